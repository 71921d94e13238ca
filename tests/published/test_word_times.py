"""Word times of people's speech with the published weights, where something of the truth is known.

Recordings are joined with known pauses, so that each word must lie within its own recording; and speech comes
late, behind noise or behind another half hour.
"""

import difflib
import re
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from asr_server.core import SAMPLE_RATE, DecodingOptions, Samples, Transcript, Word
from asr_server.metrics import REGISTRY
from harness.speech import Clip, corpus
from harness.speech.synthesis import Speech, is_installed, read_for
from tests.support.noises import make_noise
from tests.support.real_weights import real_checkpoint
from tests.support.speech import audible, silence
from tests.unit.transcription.pipeline import Pipeline, running_pipeline

WORDS = DecodingOptions(language="en", word_timestamps=True, temperatures=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
IN_MODULE = pytest.mark.asyncio(loop_scope="module")
NEAR_S = 0.1
KNOWN_NEAR_S = 0.15  # of the known starts nearly all lie so near
NEAR_SHARE, NEAR_SHARE_IN_NOISE = 0.95, 0.8  # noise covers a faint first consonant
NEAR_IN_NOISE_S = 0.2  # of a word's end, which noise that varies covers


@pytest.fixture(autouse=True)
def no_time_is_guessed() -> Iterator[None]:
    """No word of these readings has its time by its letters: no replica was lost."""
    before = REGISTRY.get_sample_value("asr_words_guessed_total")
    yield
    assert REGISTRY.get_sample_value("asr_words_guessed_total") == before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base() -> AsyncIterator[Pipeline]:
    """whisper-base, which is loaded once and encodes short audio as by default."""
    async with running_pipeline(real_checkpoint("base"), check_voice=True, short_audio="tail") as pipeline:
        yield pipeline


class Joined(NamedTuple):
    """Recordings one after another: each one's words, and its first and last audible moment in seconds."""

    samples: Samples
    spoken: list[tuple[list[str], float, float]]


def sentences() -> list[Clip]:
    """People who read English; the same words never follow each other."""
    clips = [*corpus("librivox"), *(clip for clip in corpus("recordings") if clip.name.endswith("jfk.flac"))]
    if len(clips) < 6:
        pytest.skip("the recordings of pocketsphinx-testdata are not here")
    return clips


def joined(clips: list[Clip], pauses_s: list[float], lead: Samples) -> Joined:
    """The clips behind `lead`, each with its pause behind it."""
    parts, spoken, at = [lead], [], len(lead)
    for clip, pause_s in zip(clips, pauses_s, strict=True):
        samples, (first, last) = clip.samples(), audible(clip.samples())
        samples = samples[first:last]
        spoken.append((in_words(clip.text or ""), at / SAMPLE_RATE, (at + len(samples)) / SAMPLE_RATE))
        parts += [samples, silence(pause_s)]
        at += len(samples) + len(parts[-1])
    return Joined(np.concatenate(parts), spoken)


def pink_noise(duration_s: float, level_db: float) -> Samples:
    num_samples = round(duration_s * SAMPLE_RATE)
    spectrum = np.fft.rfft(np.random.default_rng(0).normal(size=num_samples))
    noise = np.fft.irfft(spectrum / np.sqrt(np.maximum(1, np.arange(len(spectrum)))), num_samples)
    return np.asarray(noise * 10 ** (level_db / 20) / noise.std(), np.float32)


def in_words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def words_of(transcript: Transcript) -> list[Word]:
    return [word for segment in transcript.segments for word in segment.words]


def check_order(transcript: Transcript) -> None:
    """What holds for any recording."""
    words = words_of(transcript)
    for segment in transcript.segments:
        assert "".join(word.text for word in segment.words) == segment.text
        assert (segment.start_s, segment.end_s) == (segment.words[0].start_s, segment.words[-1].end_s)
    assert "".join(word.text for word in words).split() == transcript.text.split()
    assert all(word.end_s > word.start_s for word in words)
    assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(words))
    assert not words or words[-1].end_s <= transcript.duration_s + 1e-9


def placed(words: list[Word], spoken: list[tuple[list[str], float, float]]) -> dict[tuple[int, int], Word]:
    """The words that were heard right, by recording and by place in its text."""
    truth = [(i, k, word) for i, (said, _, _) in enumerate(spoken) for k, word in enumerate(said)]
    found = [("".join(in_words(word.text)), word) for word in words]
    blocks = difflib.SequenceMatcher(None, [t[2] for t in truth], [f[0] for f in found], autojunk=False)
    return {
        truth[a + n][:2]: found[b + n][1] for a, b, size in blocks.get_matching_blocks() for n in range(size)
    }


def check_places(
    found: Joined, transcript: Transcript, near_end_s: float = NEAR_S, near_share: float = NEAR_SHARE
) -> None:
    """Every word lies in its own recording, nearly all first words where it begins."""
    check_order(transcript)
    words = placed(words_of(transcript), found.spoken)
    assert len(words) >= 0.85 * sum(len(said) for said, _, _ in found.spoken)
    starts_s = []
    for (recording, place), word in words.items():
        _, start_s, end_s = found.spoken[recording]
        assert start_s - NEAR_S <= word.start_s < word.end_s <= end_s + near_end_s, word
        if place == 0:
            starts_s.append(word.start_s - start_s)
    assert np.median(starts_s) <= NEAR_S
    assert np.sum(np.abs(starts_s) > KNOWN_NEAR_S) <= max(1, (1 - near_share) * len(starts_s))


@IN_MODULE
async def test_words_lie_in_their_own_recording_and_pauses_stay_gaps(base: Pipeline) -> None:
    clips = sentences()
    said = joined(clips, [2.0, 0.4, 5.0, 2.0, 0.3, 0.5], silence(1.2))  # windows with an unread tail too
    check_places(said, await base.transcribe(said.samples, WORDS))


@pytest.mark.parametrize("level_db", [pytest.param(-50.0, marks=pytest.mark.trial), -30.0])
@IN_MODULE
async def test_the_first_word_follows_seven_seconds_of_noise(base: Pipeline, level_db: float) -> None:
    clip = sentences()[0]
    samples = np.concatenate([pink_noise(7.0, level_db), clip.samples()])
    begins_s = 7.0 + audible(clip.samples())[0] / SAMPLE_RATE
    said = Joined(samples, [(in_words(clip.text or ""), begins_s, len(samples) / SAMPLE_RATE)])
    transcript = await base.transcribe(said.samples, WORDS)
    check_places(said, transcript)
    assert transcript.segments[0].start_s >= 7.0
    plain = await base.transcribe(said.samples, DecodingOptions(language="en"))
    assert plain.text == transcript.text
    assert 7.0 <= plain.segments[0].start_s <= begins_s + NEAR_S


@pytest.mark.parametrize("kind", [pytest.param("tones", marks=pytest.mark.trial), "hum"])
@IN_MODULE
async def test_words_behind_twenty_silent_seconds_lie_in_their_recording(base: Pipeline, kind: str) -> None:
    said = joined(sentences()[:2], [0.5, 0.5], make_noise(kind, -30, 20.0, 10))
    transcript = await base.transcribe(said.samples, WORDS)
    check_order(transcript)
    for (recording, _), word in placed(words_of(transcript), said.spoken).items():
        _, start_s, end_s = said.spoken[recording]
        assert start_s - 1.0 <= word.start_s < word.end_s <= end_s + NEAR_S, word
    plain = await base.transcribe(said.samples, DecodingOptions(language="en"))
    assert plain.segments[0].start_s == pytest.approx(20.0, abs=1.0)


@IN_MODULE
async def test_times_hold_where_speech_begins_after_the_first_window(base: Pipeline) -> None:
    said = joined(sentences()[-2:], [0.6, 0.5], silence(33.0))
    check_places(said, await base.transcribe(said.samples, WORDS))


@pytest.mark.trial
@IN_MODULE
async def test_words_at_minute_20_lie_where_they_lie_at_minute_0(base: Pipeline) -> None:
    once = joined(sentences(), [0.7] * 6, silence(0.5))
    half = len(once.spoken)
    rest = silence(20 * 60 - len(once.samples) / SAMPLE_RATE)
    again = Joined(
        np.concatenate([once.samples, rest, once.samples]),
        once.spoken + [(said, start_s + 1200, end_s + 1200) for said, start_s, end_s in once.spoken],
    )
    transcript = await base.transcribe(again.samples, WORDS)
    check_places(again, transcript)
    words = placed(words_of(transcript), again.spoken)
    both = [(word, words.get((i + half, k))) for (i, k), word in words.items() if i < half]
    offs_s = [abs(late.start_s - 1200 - early.start_s) for early, late in both if late is not None]
    assert len(offs_s) > 60
    assert max(offs_s) <= NEAR_S


@pytest.mark.trial
@pytest.mark.parametrize("seed", range(6))
@IN_MODULE
async def test_words_lie_in_their_own_recording_whatever_the_pauses(base: Pipeline, seed: int) -> None:
    random, clips = np.random.default_rng(seed), list[Clip]()
    while len(clips) < 3 * len(sentences()):  # none behind itself: a text said twice is taken for a loop
        order = random.permutation(np.array(sentences(), object)).tolist()
        clips += order if clips[-1:] != order[:1] else []
    pauses_s = np.exp(random.uniform(np.log(0.3), np.log(6.0), len(clips))).tolist()
    said = joined(clips, pauses_s, silence(float(random.uniform(0, 3))))
    noise = pink_noise(len(said.samples) / SAMPLE_RATE, -70.0 + 10 * (seed % 4))
    noisy = np.asarray(said.samples + noise, np.float32)
    transcript = await base.transcribe(noisy, WORDS)
    check_places(said, transcript, NEAR_IN_NOISE_S, NEAR_SHARE_IN_NOISE)


def off_speech_s(speech: Speech, time_s: float) -> float:
    return min(max(said.start_s - time_s, time_s - said.end_s, 0.0) for said in speech.sentences)


@pytest.mark.trial
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not is_installed(), reason="the voice that reads aloud is not installed")
@pytest.mark.parametrize("beam_size", [1, 5])
@IN_MODULE
async def test_no_word_of_thirteen_minutes_lies_in_a_pause(beam_size: int) -> None:
    speech = read_for(803.0, (0.3, 1.0, 0.5, 3.0, 0.8, 5.0, 0.4, 1.5, 2.0, 4.0))
    options = msgspec.structs.replace(WORDS, early_results=True)
    streamed = msgspec.structs.replace(options, streams=True)
    checkpoint, others = real_checkpoint("base"), {"short_audio": "tail", "beam_size": beam_size}
    async with running_pipeline(checkpoint, check_voice=True, **others) as pipeline:
        transcripts = [await pipeline.transcribe(speech.samples, each) for each in (options, streamed)]
    assert transcripts[0].text == transcripts[1].text
    for transcript in transcripts:
        check_order(transcript)
        middles_s = [(word.start_s + word.end_s) / 2 for word in words_of(transcript)]
        assert max(off_speech_s(speech, middle_s) for middle_s in middles_s) <= 0.3
