"""Where chunks end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_server.audio.split import MARGIN, MIN_REST, MIN_SILENCE, Splitter, best_cut
from asr_server.core import SAMPLE_RATE, Chunk, Samples
from asr_server.levels import powers
from harness.speech import corpus
from tests.support.long_recordings import digits_not_whole, long_recording
from tests.support.speech import Spoken, audible, say, silence
from tests.unit.audio.audio_files import audio_of, chunks_by, end_of

MAX_CHUNK = 30 * SAMPLE_RATE


def split(samples: Samples, block: int = 20_000, max_chunk: int = MAX_CHUNK) -> list[Chunk]:
    return chunks_by(Splitter(max_chunk), samples, block)


def noise(num_samples: int, level: float, seed: int = 0) -> Samples:
    return np.random.default_rng(seed).normal(0, level, num_samples).astype(np.float32)


def long_talk(gap_s: float = 0.3, voice: str = "f3", seed: int = 1, count: int = 150) -> Spoken:
    rng = np.random.default_rng(seed)
    digits = "".join(str(digit) for digit in rng.integers(10, size=count))
    return say(digits, voice, gap_s=[float(gap) for gap in rng.uniform(0.7, 1.3, count) * gap_s])


def cuts_inside_words(chunks: list[Chunk], talk: Spoken) -> int:
    edges_s = [(chunk.start_s, chunk.start_s + chunk.duration_s) for chunk in chunks]
    cuts_s = [time_s for edges in edges_s for time_s in edges]
    return sum(start + 0.03 < cut < end - 0.03 for cut in cuts_s for start, end in talk.times)


@pytest.mark.parametrize("voice", ["f3", "m5", "linda", "rms"])
@pytest.mark.parametrize("level", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_no_cut_falls_inside_a_word(voice: str, level: float, offset: float) -> None:
    talk = long_talk(voice=voice)
    samples = talk.samples + noise(len(talk.samples), level) + np.float32(offset)
    chunks = split(samples)
    assert len(chunks) >= 3
    assert cuts_inside_words(chunks, talk) == 0


def test_people_who_speak_faintly_are_sent_whole() -> None:
    """With peaks at -50 dBFS, behind pauses of three seconds, in 16 bits."""
    clips = [clip for name in ("librivox", "cards", "audioeval") for clip in corpus(name)]
    if len(clips) < 30:
        pytest.skip("the recordings of people are not here; harness/speech/install.sh fetches them")
    parts, said, at = list[Samples](), list[tuple[int, int]](), 0
    for clip in clips:
        samples = clip.samples()
        first, last = audible(samples)
        samples = samples[first:last] * np.float32(10 ** (-50 / 20) / np.abs(samples).max())
        said.append((at, at + len(samples)))
        parts += [samples, silence(3.0)]
        at += len(samples) + len(parts[-1])
    sound = np.asarray(np.round(np.concatenate(parts) * 2**15) / 2**15, np.float32)
    left_out = np.ones(len(sound), bool)
    for chunk in split(sound):
        left_out[chunk.start_sample : chunk.start_sample + len(chunk.samples)] = False
    cut = [clip.name for clip, (first, last) in zip(clips, said, strict=True) if left_out[first:last].any()]
    assert cut == []


@pytest.mark.parametrize("max_chunk_s", [3, 6, 8, 15])
def test_shorter_chunks_are_cut_by_the_same_rule(max_chunk_s: int) -> None:
    talk = long_talk(count=60)
    chunks = split(talk.samples, max_chunk=max_chunk_s * SAMPLE_RATE)
    durations_s = [chunk.duration_s for chunk in chunks]
    assert max(durations_s) <= max_chunk_s
    assert min(durations_s[:-2]) >= max_chunk_s / 2
    assert min(durations_s) >= max_chunk_s / 3
    assert cuts_inside_words(chunks, talk) == 0


@pytest.mark.parametrize("seed", range(5))
def test_windows_are_filled_as_far_as_the_long_pauses_allow(seed: int) -> None:
    talk = long_talk(seed=seed)
    for chunk in split(talk.samples)[:-1]:
        end_s = chunk.start_s + chunk.duration_s
        window_end_s = chunk.start_s + 30
        pauses = [(end, start) for (_, end), (start, _) in zip(talk.times, talk.times[1:], strict=False)]
        in_reach = [(begin, end) for begin, end in pauses if window_end_s - 7 < begin and end < window_end_s]
        longest_s = max(end - begin for begin, end in in_reach)
        last_long_s = max(begin for begin, end in in_reach if end - begin > 0.75 * longest_s)
        assert end_s > last_long_s - 0.1


@pytest.mark.parametrize(("first_s", "cut_s"), [(1.0, (24.0, 25.0)), (0.3, (28.0, 28.3))])
def test_the_later_of_two_pauses_unless_much_shorter(first_s: float, cut_s: tuple[float, float]) -> None:
    samples = noise(MAX_CHUNK, 0.1)
    for pause_s, duration_s in ((24.0, first_s), (28.0, 0.3)):
        samples[int(pause_s * SAMPLE_RATE) : int((pause_s + duration_s) * SAMPLE_RATE)] = 0
    assert cut_s[0] <= best_cut(powers(samples)) / SAMPLE_RATE <= cut_s[1]


def test_a_pause_between_words_is_preferred_to_a_stop_consonant() -> None:
    samples = noise(MAX_CHUNK, 0.1)
    samples[25 * SAMPLE_RATE : 25 * SAMPLE_RATE + SAMPLE_RATE // 5] *= 0.01  # 200 ms
    samples[29 * SAMPLE_RATE : 29 * SAMPLE_RATE + SAMPLE_RATE // 16] = 0  # 60 ms, and quieter
    assert 25.0 <= best_cut(powers(samples)) / SAMPLE_RATE <= 25.2


def test_sound_without_any_pause_is_cut_all_the_same() -> None:
    chunks = split(noise(100 * SAMPLE_RATE, 0.1))
    assert sum(len(chunk.samples) for chunk in chunks) == 100 * SAMPLE_RATE
    assert 4 <= len(chunks) <= 5


@pytest.mark.parametrize("level", [0.0, 1e-5])
@pytest.mark.parametrize("duration_s", [0.2, 5.0, 30.0, 95.0])
def test_a_silent_file_has_no_chunk(duration_s: float, level: float) -> None:
    samples = noise(int(duration_s * SAMPLE_RATE), level)
    assert split(samples) == []


def test_long_silences_are_left_out_with_a_margin_around_speech() -> None:
    first, second = say("123", lead_s=0.0), say("456", lead_s=0.0)
    samples = np.concatenate([silence(40), first.samples, silence(45), second.samples, silence(50)])
    talk, later = split(samples)
    assert 40 * SAMPLE_RATE - talk.start_sample == pytest.approx(MARGIN, abs=SAMPLE_RATE // 20)
    assert end_of([talk, later]) < len(samples) - 49 * SAMPLE_RATE
    assert talk.duration_s < first.times[-1][1] + 2 * MARGIN / SAMPLE_RATE + 0.5


def test_short_pauses_stay_within_their_chunk() -> None:
    talk = say("12345", gap_s=0.9)
    assert len(split(talk.samples)) == 1


@pytest.mark.parametrize("peak_db", [-50, -40, -20])
def test_quiet_speech_is_kept_whole(peak_db: float) -> None:
    talk = long_talk()
    quiet = talk.samples * np.float32(10 ** (peak_db / 20) / np.abs(talk.samples).max())
    chunks = split(quiet)
    for start_s, end_s in talk.times:
        assert any(
            chunk.start_sample <= start_s * SAMPLE_RATE + 800
            and end_s * SAMPLE_RATE - 800 <= chunk.start_sample + len(chunk.samples)
            for chunk in chunks
        )


def test_a_chunk_leaves_once_enough_is_there_for_the_next_one() -> None:
    splitter = Splitter(MAX_CHUNK)
    assert splitter.push(noise(MAX_CHUNK + MIN_REST, 0.1)) == []
    assert len(splitter.push(noise(1, 0.1))) == 1
    assert splitter.held_bytes <= 4 * (MAX_CHUNK + MIN_REST)


@pytest.mark.parametrize("max_chunk_s", [3, 6, 8, 30])
@pytest.mark.parametrize("over_s", [1 / SAMPLE_RATE, 0.01, 0.3, 0.999, 1.0, 5.5])
def test_a_cut_leaves_at_least_a_third_for_the_last_chunk(max_chunk_s: int, over_s: float) -> None:
    """Of sound that invites a cut at the very end of what a chunk may hold."""
    max_chunk = max_chunk_s * SAMPLE_RATE
    samples = noise(max_chunk + round(over_s * SAMPLE_RATE), 0.1)
    samples[max_chunk - SAMPLE_RATE // 5 : max_chunk] = 0
    *before, last = split(samples, max_chunk=max_chunk)
    assert all(len(chunk.samples) <= max_chunk for chunk in before)
    assert len(last.samples) >= max_chunk // 3


def test_speech_that_fits_a_chunk_is_not_cut_because_of_the_silence_behind_it() -> None:
    (chunk,) = split(np.concatenate([noise(25 * SAMPLE_RATE, 0.1), silence(9.0)]))
    assert chunk.duration_s == pytest.approx(25 + MARGIN / SAMPLE_RATE, abs=0.05)


def test_a_word_alone_after_a_long_pause_is_a_chunk_however_short() -> None:
    word = say("3", lead_s=0.0).samples[: SAMPLE_RATE // 2]
    chunks = split(np.concatenate([say("12").samples, silence(40), word]))
    assert chunks[-1].duration_s == pytest.approx(0.5 + MARGIN / SAMPLE_RATE, abs=0.05)


def test_samples_are_copied_because_their_memory_is_used_again() -> None:
    splitter, block, sound = Splitter(MAX_CHUNK), np.empty(16_000, np.float32), noise(40 * SAMPLE_RATE, 0.1)
    chunks: list[Chunk] = []
    for at in range(0, len(sound), len(block)):
        block[:] = sound[at : at + len(block)]
        chunks += splitter.push(block)
    assert np.array_equal(audio_of(chunks + splitter.finish()), sound)


parts = st.lists(
    st.tuples(st.sampled_from(["talk", "hiss", "nothing"]), st.floats(0.001, 40.0), st.floats(0.0001, 1.0)),
    min_size=1,
    max_size=5,
)


@given(parts, st.integers(1, 700_000))
@settings(max_examples=12, deadline=None)
def test_every_sample_is_in_a_chunk_or_silent(parts: list[tuple[str, float, float]], block: int) -> None:
    talk = np.tile(say("8675309").samples, 25)
    sounds = {"talk": talk, "hiss": noise(len(talk), 0.05), "nothing": np.zeros_like(talk)}
    samples = np.concatenate(
        [sounds[kind][: int(seconds * SAMPLE_RATE)] * np.float32(gain) for kind, seconds, gain in parts]
    )
    chunks = split(samples, block)
    ended_at = 0
    for chunk in [*chunks, Chunk(len(chunks), len(samples), samples[:0])]:
        left_out = samples[ended_at : chunk.start_sample]
        assert len(left_out) < MIN_SILENCE or np.percentile(np.abs(left_out), 99) < 1e-3
        ended_at = chunk.start_sample + len(chunk.samples)
        assert np.array_equal(chunk.samples, samples[chunk.start_sample : ended_at])


@given(st.integers(1, 3_000_000))
@settings(max_examples=8, deadline=None)
def test_blocks_of_any_size_give_the_same_chunks(block: int) -> None:
    samples = long_talk(count=80).samples
    starts = [chunk.start_sample for chunk in split(samples)]
    assert [chunk.start_sample for chunk in split(samples, block)] == starts


@pytest.mark.parametrize(
    ("duration_s", "max_chunk_s"),
    [
        (100.0, 6),
        pytest.param(7200.0, 6, marks=pytest.mark.trial),
        pytest.param(7200.0, 30, marks=pytest.mark.trial),
    ],
)
def test_hours_of_turns_between_noises_are_cut_outside_of_words(duration_s: float, max_chunk_s: int) -> None:
    recording = long_recording(duration_s, seed=4)
    chunks = split(recording.samples, max_chunk=max_chunk_s * SAMPLE_RATE)
    assert digits_not_whole(recording, chunks) == []


@given(st.integers(1, 100), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_a_peek_shows_what_the_end_would_give_and_changes_nothing(num_before: int, num_after: int) -> None:
    """Of chunks of 3 s; what is shown stays as it was while more is pushed."""
    samples = noise((num_before + num_after) * SAMPLE_RATE // 10, 0.1)
    before, after = np.split(samples, [num_before * SAMPLE_RATE // 10])
    splitter = Splitter(3 * SAMPLE_RATE)
    chunks = splitter.push(before)
    shown = [*chunks, *splitter.peek()]
    chunks += [*splitter.push(after), *splitter.finish()]
    assert np.array_equal(audio_of(shown), before)
    assert np.array_equal(audio_of(chunks), samples)
