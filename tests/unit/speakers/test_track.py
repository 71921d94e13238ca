"""Who speaks when, by the real models, through whole recordings; test_clustering.py has more, by numbers."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from scipy.signal import fftconvolve

from asr_server.annexes.speakers import track as track_module
from asr_server.annexes.speakers.labels import SpeakerOfTime, Turn
from asr_server.annexes.speakers.segmentation import STEP, WINDOW
from asr_server.annexes.speakers.track import (
    SpeakerTrack,
    decode_reference,
    names_of_labels,
    reference_embeddings,
)
from asr_server.audio.recording import PreprocessPool
from asr_server.core import SAMPLE_RATE, Samples, SpeakerCount
from asr_server.errors import InvalidValue
from benchmarks.speakers import errors
from harness.speech.conversations import Conversation
from harness.speech.corpora import Clip
from harness.speech.noises import by_telephone
from tests.support.fake_replica import noise, wav
from tests.support.speech import RECORDINGS, VOICES, audible, say
from tests.unit.speakers.people import TALK, join

FIELD_ANSWERS = {"e2_two_people_12s.flac": "e2", "e3_two_women_45s.opus": "e3"}


def field_recording(name: str) -> tuple[Samples, list[Turn]]:
    """Return the sound, and who really speaks when."""
    path = RECORDINGS.parent / "field" / name
    if not path.exists():
        pytest.skip(f"{name} lies beside the repository, and is not here")
    spoken = json.loads(path.with_name(f"{FIELD_ANSWERS.get(name, path.stem)}.json").read_text())
    return Clip(name, "field", path, None, "en", "").samples(), [Turn(*turn) for turn in spoken]


async def turns_of(samples: Samples, track: SpeakerTrack | None = None) -> list[Turn]:
    track = track or SpeakerTrack()
    for first in range(0, len(samples), SAMPLE_RATE):
        track.push(samples[first : first + SAMPLE_RATE])
        await track.wait_for_room()
    return (await track.spoken()).turns


def heard_s(samples: Samples, start_s: float, end_s: float) -> tuple[float, float]:
    """Where a part of them is heard: clips begin and end with silence."""
    first = round(start_s * SAMPLE_RATE)
    start, end = audible(samples[first : round(end_s * SAMPLE_RATE)])
    return (first + start) / SAMPLE_RATE, (first + end) / SAMPLE_RATE


@pytest.fixture(scope="module")
def turns_of_talk() -> list[Turn]:
    return asyncio.run(turns_of(join([said for _, said in TALK])[0]))


def test_two_people_are_told_apart_in_the_order_in_which_they_speak(turns_of_talk: list[Turn]) -> None:
    _, places = join([said for _, said in TALK])
    speakers = SpeakerOfTime(turns_of_talk)
    assert [speakers.of(*place) for place in places] == [label for label, _ in TALK]


def test_turns_lie_where_people_speak_across_the_borders_of_windows(turns_of_talk: list[Turn]) -> None:
    samples, places = join([said for _, said in TALK])
    turns = turns_of_talk
    assert len(samples) / SAMPLE_RATE > 20  # four windows and more
    for start_s, end_s in (heard_s(samples, *place) for place in places):
        within = [turn for turn in turns if start_s - 0.15 <= turn.start_s and turn.end_s <= end_s + 0.15]
        assert sum(turn.end_s - turn.start_s for turn in within) > 0.7 * (end_s - start_s)
        turns = [turn for turn in turns if turn not in within]
    assert turns == []


def test_those_without_a_reference_are_letters_by_who_spoke_first() -> None:
    spoken = {label: [(float(30 - label), 100.0)] for label in range(30)}  # the last label speaks first
    named = names_of_labels(spoken, {29: 1}, ["B", "ann"])
    assert [named[label] for label in (29, 28, 27, 26, 3, 2, 1, 0)] == [
        "ann", "A", "C", "D", "AA", "AB", "AC", "AD",
    ]  # fmt: skip


async def test_two_people_in_twelve_seconds_are_two() -> None:
    samples, spoken = field_recording("e2_two_people_12s.flac")
    turns = await turns_of(samples)
    assert {turn.speaker for turn in turns} == {"A", "B"}
    assert errors(Conversation(samples, ["man", "woman"], spoken, []), turns).rate < 0.05


async def test_a_reference_names_who_says_a_word_among_another_s_sentences() -> None:
    samples, places = join([say("3141592653"), say("27", "rms"), say("5897932384"), say("18", "rms")])
    names = {name: say("4567890", voice).samples for name, voice in (("ann", "f3"), ("bob", "rms"))}
    track = SpeakerTrack(None, await reference_embeddings(names))
    speakers = SpeakerOfTime(await turns_of(samples, track))
    assert [speakers.of(*place) for place in places] == ["ann", "bob", "ann", "bob"]


async def test_two_women_by_telephone_are_two() -> None:
    samples, spoken = field_recording("c39b_en_fr_1.ogg")
    turns = await turns_of(samples)
    assert {turn.speaker for turn in turns} == {"A", "B"}
    assert errors(Conversation(samples, ["en", "fr"], spoken, []), turns).confused_s < 1


@pytest.mark.slow
async def test_a_long_turn_does_not_keep_the_name_of_who_spoke_before_it() -> None:
    samples, spoken = field_recording("e3_two_women_45s.opus")
    turns = await turns_of(samples)
    assert errors(Conversation(samples, ["first", "second"], spoken, []), turns).rate < 0.08


async def test_in_a_hall_turns_begin_and_end_where_the_voices_do() -> None:
    samples, places = join([said for _, said in TALK])
    rng = np.random.default_rng(0)
    echo = rng.standard_normal(SAMPLE_RATE) * 10 ** (-3 * np.arange(SAMPLE_RATE) / (0.8 * SAMPLE_RATE))
    echo *= 10 ** (-5 / 20) / np.sqrt((echo**2).sum())  # 60 dB in 0.8 s, 5 dB less energy than the voice
    echo[0] += 1
    turns = await turns_of(fftconvolve(samples, echo)[: len(samples)].astype(np.float32))
    for start_s, end_s in places:
        own = [turn for turn in turns if turn.end_s > start_s and turn.start_s < end_s]
        said = samples[round(start_s * SAMPLE_RATE) : round(end_s * SAMPLE_RATE)]
        voiced = np.flatnonzero(np.abs(said) > 0.01)
        assert own[0].start_s == pytest.approx(start_s + voiced[0] / SAMPLE_RATE, abs=0.1)
        assert own[-1].end_s == pytest.approx(start_s + voiced[-1] / SAMPLE_RATE, abs=0.1)


async def test_a_voice_that_becomes_faint_is_still_heard() -> None:
    samples, (loud, faint) = join([said for label, said in TALK if label == "A"])
    samples[round(faint[0] * SAMPLE_RATE) :] *= 0.05  # 26 dB less
    turns = await turns_of(samples)
    assert {turn.speaker for turn in turns} == {"A"}
    spoken_s = sum(turn.end_s - turn.start_s for turn in turns if turn.start_s > loud[1])
    assert spoken_s > 0.7 * (faint[1] - faint[0])


async def test_turns_do_not_depend_on_the_sizes_of_the_blocks() -> None:
    samples, _ = join([said for _, said in TALK[:2]])
    whole = SpeakerTrack()
    whole.push(samples)
    assert (await whole.spoken()).turns == await turns_of(samples) != []


async def test_one_person_is_one_speaker_whatever_the_level() -> None:
    samples, _ = join([say("31415926"), say("58979323"), say("62643383")])
    levels = np.repeat([1.0, 0.1, 0.5], -(-len(samples) // 3))[: len(samples)].astype(np.float32)
    assert {turn.speaker for turn in await turns_of(samples * levels)} == {"A"}


@pytest.mark.trial
@pytest.mark.parametrize("voice", VOICES)
async def test_an_hour_of_one_voice_is_one_person_whatever_the_level_and_the_line(voice: str) -> None:
    rng = np.random.default_rng(0)
    samples, _ = join([say("".join(rng.choice(list("0123456789"), 8)), voice) for _ in range(1000)])
    samples = samples[: 3600 * SAMPLE_RATE]
    assert len(samples) == 3600 * SAMPLE_RATE
    samples *= np.repeat(10 ** (rng.uniform(-26, 0, 60) / 20), 60 * SAMPLE_RATE).astype(np.float32)
    called = slice(20 * 60 * SAMPLE_RATE, 32 * 60 * SAMPLE_RATE)
    samples[called] = by_telephone(samples[called])
    assert {turn.speaker for turn in await turns_of(samples)} == {"A"}


@pytest.mark.trial
async def test_who_goes_on_by_telephone_is_the_same_and_who_answers_is_another() -> None:
    samples, places = join([said for _, said in TALK])
    for start_s, end_s in places[2:]:
        called = slice(round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE))
        samples[called] = by_telephone(samples[called])
    speakers = SpeakerOfTime(await turns_of(samples))
    assert [speakers.of(*place) for place in places] == [label for label, _ in TALK]


@pytest.mark.parametrize(
    "level", [*(pytest.param(level, marks=pytest.mark.trial) for level in (0.0, 0.01)), 0.1]
)
async def test_nobody_speaks_in_silence_and_noise(level: float) -> None:
    noise = np.random.default_rng(0).standard_normal(12 * SAMPLE_RATE).astype(np.float32)
    assert await turns_of(noise * np.float32(level)) == []


@pytest.mark.trial
async def test_a_count_that_is_given_is_kept() -> None:
    samples, _ = join([said for _, said in TALK])
    turns = await turns_of(samples, SpeakerTrack(SpeakerCount(1, 1)))
    assert {turn.speaker for turn in turns} == {"A"}


@pytest.mark.trial
async def test_a_known_voice_gets_its_name_and_a_stranger_s_is_given_to_nobody() -> None:
    samples, places = join([said for _, said in TALK])
    ann, stranger = say("4567890", "f3").samples, say("90909090", "linda").samples
    track = SpeakerTrack(None, await reference_embeddings({"ann": ann, "zoe": stranger}))
    speakers = SpeakerOfTime(await turns_of(samples, track))
    assert [speakers.of(*place) for place in places] == ["ann", "A", "ann", "A"]


ANN, BOB = np.eye(192, dtype=np.float32)[:2]


class Pending(ThreadPoolExecutor):
    """Keeps what it is given, and does it when a test says so."""

    def __init__(self) -> None:
        super().__init__(1)
        self.futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.mark.parametrize("num_batches", [2, 3, 4])
async def test_a_decoder_waits_until_two_batches_at_most_are_not_heard(
    num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, track = Pending(), SpeakerTrack()
    monkeypatch.setattr(track_module, "_executor", executor)
    track.push(np.zeros(WINDOW + (4 * num_batches - 1) * STEP, np.float32))
    assert len(executor.futures) == num_batches
    waiting = asyncio.create_task(track.wait_for_room())
    await asyncio.sleep(0)
    for future in executor.futures[: num_batches - 2]:
        assert not waiting.done()
        future.set_result([])
        for _ in range(3):  # the task's future is told, then the task
            await asyncio.sleep(0)
    assert waiting.done()


async def test_each_reference_is_heard_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track_module, "hear_reference", lambda samples: samples * 2)
    given = {str(number): np.full(3, number, np.float32) for number in range(3)}
    found = await reference_embeddings(given)
    assert {name: each.tolist() for name, each in found.items()} == {"0": [0] * 3, "1": [2] * 3, "2": [4] * 3}


@pytest.fixture
def pool() -> Iterator[PreprocessPool]:
    pool = PreprocessPool(1)
    yield pool
    pool.shutdown()


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def refusal(url: str, pool: PreprocessPool) -> str:
    with pytest.raises(InvalidValue) as caught:
        await decode_reference(url, pool)
    assert caught.value.param == "known_speaker_references[]"
    return caught.value.message


@pytest.mark.parametrize(("duration_s", "head"), [(2.0, "audio/wav"), (10.0, "audio/x-wav;codecs=1")])
async def test_a_reference_lasts_2_to_10_seconds(duration_s: float, head: str, pool: PreprocessPool) -> None:
    url = f"data:{head};base64,{encoded(wav(noise(duration_s)))}"
    assert len(await decode_reference(url, pool)) == round(duration_s * SAMPLE_RATE)


@pytest.mark.parametrize(("duration_s", "told"), [(1.8, "1.8"), (10.2, "10.2"), (40.0, "40.0")])
async def test_a_shorter_or_longer_one_is_refused_with_its_length(
    duration_s: float, told: str, pool: PreprocessPool
) -> None:
    url = f"data:audio/wav;base64,{encoded(wav(noise(duration_s)))}"
    expected = f"'known_speaker_references[]' are 2 to 10 s long; one has {told} s."
    assert await refusal(url, pool) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        encoded(b"RIFF"),
        "data:audio/wav;base64,",
        "data:audio/wav,RIFF",
        "data:audio/wav;base64,UklGRg=",
        "data:audio/wav;base64,Ukl GRg==",
        f"https://host/data:audio/wav;base64,{encoded(b'RIFF')}",
        f"data:audio wav;base64,{encoded(b'RIFF')}",
    ],
)
async def test_what_is_no_data_url_is_told_how_one_looks(url: str, pool: PreprocessPool) -> None:
    expected = "'known_speaker_references[]' are data URLs: data:audio/wav;base64,..."
    assert await refusal(url, pool) == expected


async def test_what_is_no_audio_is_told_so(pool: PreprocessPool) -> None:
    message = await refusal(f"data:audio/wav;base64,{encoded(b'no audio')}", pool)
    assert message.startswith("One of 'known_speaker_references[]' cannot be read: ")
