"""End to end: the official client in strict mode, a real server, the embedded model, real sound."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent, TranscriptionVerbose

from asr_server.core import Samples
from tests.contract.official_client import FORMATS, SPOKEN, plain, transcribe
from tests.support.noises import KINDS, make_noise
from tests.support.speech import RECORDINGS, Spoken, say, silence
from tests.unit.api.sample_files import m4a, mp3, opus, sound_file


@pytest.mark.parametrize("response_format", FORMATS)
async def test_the_client_hears_digits_in_every_format(client: AsyncOpenAI, response_format: str) -> None:
    answer = await transcribe(client, sound_file(SPOKEN.samples), response_format=response_format)
    assert plain(answer, response_format) == SPOKEN.text


async def test_verbose_json_has_times_that_hold(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        sound_file(SPOKEN.samples),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert isinstance(answer, TranscriptionVerbose)
    assert (answer.language, answer.usage and answer.usage.type) == ("english", "duration")
    assert answer.duration == pytest.approx(len(SPOKEN.samples) / 16_000, abs=1e-3)
    assert answer.segments is not None
    assert [segment.id for segment in answer.segments] == [0, 1]  # split at the long pause
    truth = [(SPOKEN.times[0][0], SPOKEN.times[2][1]), (SPOKEN.times[3][0], SPOKEN.times[5][1])]
    for segment, (start_s, end_s) in zip(answer.segments, truth, strict=True):
        assert segment.start == pytest.approx(start_s, abs=0.2)
        assert segment.end == pytest.approx(end_s, abs=0.2)


async def test_a_stream_is_typed_and_its_deltas_are_the_text(client: AsyncOpenAI) -> None:
    events = [event async for event in await transcribe(client, sound_file(SPOKEN.samples), stream=True)]
    *deltas, done = events
    assert all(isinstance(delta, TranscriptionTextDeltaEvent) for delta in deltas)
    assert isinstance(done, TranscriptionTextDoneEvent)
    assert "".join(delta.delta for delta in deltas) == done.text == SPOKEN.text
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


async def test_logprobs_come_with_json(client: AsyncOpenAI) -> None:
    answer = await transcribe(client, sound_file(SPOKEN.samples), include=["logprobs"])
    assert b"".join(bytes(map(int, entry.bytes)) for entry in answer.logprobs).decode().strip() == SPOKEN.text
    assert all(entry.logprob <= 0 for entry in answer.logprobs)


@pytest.mark.parametrize("name", ["upload", "speech.mp3", "speech.txt", "speech.wav;codecs=opus"])
async def test_the_content_counts_and_not_the_name(client: AsyncOpenAI, name: str) -> None:
    assert (await transcribe(client, sound_file(SPOKEN.samples, "FLAC"), name)).text == SPOKEN.text


@pytest.mark.parametrize("encode", [m4a, opus, mp3])
async def test_compressed_files_are_heard(client: AsyncOpenAI, encode: Callable[[Samples], bytes]) -> None:
    assert (await transcribe(client, encode(SPOKEN.samples))).text == SPOKEN.text


async def test_every_option_of_the_client_is_understood(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        sound_file(SPOKEN.samples),
        language="en",
        temperature=0,
        chunking_strategy={"type": "server_vad", "threshold": 1.0},
    )
    assert answer.text == SPOKEN.text


async def test_the_models_are_listed(client: AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names[:2] == ["whisper-digits", "whisper-1"]
    assert {"gpt-4o-transcribe", "gpt-4o-mini-transcribe", "gpt-transcribe"} < set(names)
    assert {"gpt-live-transcribe", "gpt-realtime-whisper"} < set(names)  # LiveKit's and pipecat's
    model = await client.models.retrieve("gpt-transcribe")
    assert (model.id, model.shutdown_date) == ("gpt-transcribe", None)


@pytest.mark.parametrize("response_format", FORMATS)
async def test_silence_is_empty_in_every_format(client: AsyncOpenAI, response_format: str) -> None:
    answer = await transcribe(client, sound_file(silence(3.0)), response_format=response_format)
    assert plain(answer, response_format) == ""
    if response_format == "vtt":
        assert answer == "WEBVTT\n\n"


@pytest.mark.parametrize("name", ["silence-1s.wav", "cough.wav", "jfk.wav"])
async def test_what_holds_no_digits_is_empty(client: AsyncOpenAI, name: str) -> None:
    if not RECORDINGS.exists():
        pytest.skip(f"{RECORDINGS} is not here: recordings of people are not part of the repository")
    assert (await transcribe(client, (RECORDINGS / name).read_bytes())).text == ""


LEVELS_DB: Final = (-50, -40, -30, -20, -10)
AT_ONCE: Final = 3


async def words_of(
    client: AsyncOpenAI, sounds: list[tuple[str, int, float, int]]
) -> dict[tuple[str, int, float, int], str]:
    """The texts that are not empty, by kind, level, length and seed of the noise."""
    places = asyncio.Semaphore(AT_ONCE)

    async def text_of(sound: tuple[str, int, float, int]) -> str:
        async with places:
            return str((await transcribe(client, sound_file(make_noise(*sound)))).text)

    texts = await asyncio.gather(*(text_of(sound) for sound in sounds))
    return {sound: text for sound, text in zip(sounds, texts, strict=True) if text}


async def test_a_few_seconds_of_each_kind_of_noise_give_not_one_word(client: AsyncOpenAI) -> None:
    assert await words_of(client, [(kind, -30, 4.0, 3) for kind in KINDS]) == {}


@pytest.mark.trial
@pytest.mark.timeout(3600)
async def test_50_minutes_of_noises_at_all_levels_give_not_one_word(client: AsyncOpenAI) -> None:
    sounds = [(kind, level, 20.0, seed) for kind in KINDS for level in LEVELS_DB for seed in range(3)]
    assert await words_of(client, sounds) == {}


NEAR_S = 0.1
WORDS: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
# From one voice to the next, close together and far apart.
SAID = [
    say("20717", "f3", gap_s=[0.1, 0.3, 0.9, 0.2, 0.3]),
    say("38146", "linda", gap_s=[0.2, 0.1, 0.2, 0.7, 0.3]),
    say("4907", "rms", gap_s=[0.4, 0.15, 0.25, 0.3]),
]


async def times_of(client: AsyncOpenAI, file: bytes) -> list[tuple[str, float, float]]:
    answer = await transcribe(client, file, **WORDS)
    assert answer.segments is None
    assert answer.text == " ".join(word.word for word in answer.words)
    return [(word.word, word.start, word.end) for word in answer.words]


def off_by(found: list[tuple[str, float, float]], spoken: list[Spoken], first_s: list[float]) -> list[float]:
    """The larger of a word's two errors in seconds, for each word that was heard as what it is."""
    truth = [
        (name, start + at_s, end + at_s)
        for said, at_s in zip(spoken, first_s, strict=True)
        for name, (start, end) in zip(said.text.split(), said.times, strict=True)
    ]
    right = [(f, t) for f, t in zip(found, truth, strict=True) if f[0] == t[0]]
    assert len(right) >= 0.9 * len(truth)
    return [max(abs(f[1] - t[1]), abs(f[2] - t[2])) for f, t in right]


async def test_words_lie_where_they_were_said_at_minute_0_and_at_minute_20(client: AsyncOpenAI) -> None:
    """Nobody speaks in between, or the test would take its time."""
    wait = silence(20 * 60)
    samples = np.concatenate([*(said.samples for said in SAID), wait, *(said.samples for said in SAID)])
    starts_s = np.cumsum([0.0, *(len(said.samples) / 16_000 for said in SAID)]).tolist()
    again_s = [starts_s[-1] + len(wait) / 16_000 + start_s for start_s in starts_s[:-1]]
    found = await times_of(client, sound_file(samples, "FLAC"))
    half = len(found) // 2
    early = off_by(found[:half], SAID, starts_s[:-1])
    late = off_by(found[half:], SAID, again_s)
    assert np.mean(np.array([*early, *late]) <= NEAR_S) >= 0.95
    assert abs(np.median(early) - np.median(late)) < 0.01, "they drift"


async def test_words_lie_where_they_were_said_though_noise_fills_the_pauses(client: AsyncOpenAI) -> None:
    samples = np.concatenate([said.samples for said in SAID])
    loudness = float(np.std(samples[samples != 0]))
    noise = np.random.default_rng(0).normal(0, loudness * 10 ** (-30 / 20), len(samples))
    starts_s = np.cumsum([0.0, *(len(said.samples) / 16_000 for said in SAID)]).tolist()
    found = await times_of(client, sound_file((samples + noise).astype(np.float32), "FLAC"))
    assert np.mean(np.array(off_by(found, SAID, starts_s[:-1])) <= NEAR_S) >= 0.9


async def test_both_granularities_give_words_within_their_segments(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        sound_file(SPOKEN.samples),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert len(answer.segments) == 2
    assert [word.word for word in answer.words] == SPOKEN.text.split()
    for segment in answer.segments:
        inside = [word for word in answer.words if segment.start - 0.2 < word.start < segment.end]
        assert [word.word for word in inside] == segment.text.split()
    times = [time for word in answer.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[-1] <= answer.duration
