"""What `chunking_strategy` does to loudness before it looks for voices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from asr_server.audio.loudness import BLOCK, MAX_GAIN_DB, TARGET_DB, LoudnessNormalizer
from asr_server.core import SAMPLE_RATE, Samples
from tests.noises import KINDS, make_noise
from tests.speech import Spoken, say, silence

TALK = say("83052174", "linda", gap_s=0.3)


def normalized(samples: Samples, block: int = 20_000) -> Samples:
    normalizer = LoudnessNormalizer()
    given = [normalizer.push(samples[at : at + block]) for at in range(0, len(samples), block)]
    return np.concatenate([*given, normalizer.finish()])


def at_peak(samples: Samples, peak_db: float) -> Samples:
    return np.asarray(samples * (10 ** (peak_db / 20) / np.abs(samples).max()), np.float32)


def level_db(samples: Samples) -> float:
    """Of the loudest 50 ms."""
    blocks = samples[: len(samples) // BLOCK * BLOCK].reshape(-1, BLOCK)
    return float(20 * np.log10(blocks.std(axis=1).max() + 1e-9))


@pytest.mark.parametrize("peak_db", [-50.0, -30.0, -10.0, 0.0])
def test_speech_of_any_level_becomes_about_as_loud(peak_db: float) -> None:
    assert level_db(normalized(at_peak(TALK.samples, peak_db))) == pytest.approx(TARGET_DB, abs=13)


@pytest.mark.parametrize(
    ("before_db", "after_db"), [(-60, -36), (-52, -22), (-45, -20), (-30, -20), (-8, -18)]
)
def test_bursts_between_silences_get_the_level_of_speech_within_the_bounds(
    before_db: float, after_db: float
) -> None:
    tone = np.sin(2 * np.pi * 400 * np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE)
    burst = np.concatenate([tone * 2**0.5 * 10 ** (before_db / 20), np.zeros(SAMPLE_RATE // 2)])
    found = normalized(np.tile(burst, 6).astype(np.float32))
    assert level_db(found) == pytest.approx(after_db, abs=0.1)


@pytest.mark.parametrize("jump_db", [-20.0, 20.0])
def test_a_jump_of_20_db_within_a_file_is_gone(jump_db: float) -> None:
    first = at_peak(TALK.samples, -20.0 - jump_db / 2)
    second = at_peak(TALK.samples, -20.0 + jump_db / 2)
    even = normalized(np.concatenate([first, second]))
    assert abs(level_db(even[: len(first)]) - level_db(even[len(first) :])) < 3


@pytest.mark.parametrize("kind", ["hum", "white", "pink", "silence"])
@pytest.mark.parametrize("level", [-70.0, -50.0, -30.0])
def test_steady_noise_is_not_lifted(kind: str, level: float) -> None:
    noise = make_noise(kind, level, 6.0)
    assert level_db(normalized(noise)) < level_db(noise) + 3


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_is_lifted_beyond_the_bound(kind: str) -> None:
    noise = make_noise(kind, -60.0, 6.0)
    assert level_db(normalized(noise)) <= max(level_db(noise) + MAX_GAIN_DB, TARGET_DB) + 0.1
    assert np.abs(normalized(noise)).max() <= 1.0


def test_the_noise_of_a_room_is_lifted_no_more_than_the_words_in_it_allow() -> None:
    talk = at_peak(TALK.samples, -35.0)
    sound = make_noise("pink", -60.0, 8.0 + len(talk) / SAMPLE_RATE)
    sound[4 * SAMPLE_RATE :][: len(talk)] += talk
    before, after = normalized(sound)[: SAMPLE_RATE * 2], normalized(sound)[-SAMPLE_RATE * 2 :]
    assert max(level_db(before), level_db(after)) < -50


@pytest.mark.parametrize("peak", [1.0, 3.0])
def test_nothing_is_clipped(peak: float) -> None:
    """A shout in a whisper, and samples beyond full scale."""
    whisper, shout = at_peak(TALK.samples, -45.0), TALK.samples[: 2 * SAMPLE_RATE]
    shout = np.asarray(shout * (peak / np.abs(shout).max()), np.float32)
    for sound in (np.concatenate([whisper, shout, whisper]), np.concatenate([shout, whisper])):
        assert np.abs(normalized(sound)).max() <= 0.95 + 1e-5


@pytest.mark.parametrize("block", [1, BLOCK - 1, BLOCK, 7777, 10**6])
def test_the_size_of_the_blocks_changes_nothing(block: int) -> None:
    sound = np.concatenate([at_peak(TALK.samples, -30.0), silence(2.0), TALK.samples])[
        : 10 * SAMPLE_RATE + 123
    ]
    if block == 1:
        sound = sound[: BLOCK * 45 + 3]
    np.testing.assert_array_equal(normalized(sound, block), normalized(sound, 20_000))
    assert len(normalized(sound, block)) == len(sound)


@pytest.mark.parametrize("num_samples", [0, 1, 799, 800, 801])
def test_the_shortest_sounds_keep_their_length(num_samples: int) -> None:
    assert len(normalized(TALK.samples[10_000 : 10_000 + num_samples])) == num_samples


def test_what_is_held_back_is_bounded() -> None:
    normalizer = LoudnessNormalizer()
    for _ in range(100):
        normalizer.push(TALK.samples[:12_345])
        assert normalizer.num_held <= 2.0 * SAMPLE_RATE


def test_a_waveform_keeps_its_shape() -> None:
    """Within a word the gain hardly moves."""
    spoken: Spoken = say("8", "linda", gap_s=0.5)
    quiet = at_peak(spoken.samples, -35.0)
    assert np.corrcoef(normalized(quiet), quiet)[0, 1] > 0.999


def by_definition(samples: Samples) -> Samples:
    """Each block of 50 ms by itself: its neighbours' loudest and quietest, in loops."""
    num_blocks = -(-len(samples) // 800)
    blocks = np.pad(samples, (0, num_blocks * 800 - len(samples))).astype(np.float64).reshape(-1, 800)
    levels = 10 * np.log10(np.maximum(blocks.var(axis=1), 1e-9))

    def around(values: list[float], reach: int, number: int) -> list[float]:
        return values[max(0, number - reach) : number + reach + 1]

    numbers = range(num_blocks)
    bridged = [max(around(levels.tolist(), 15, n)) for n in numbers]
    bridged = [min(around(bridged, 15, n)) for n in numbers]
    speech = [max(around(bridged, 5, n)) for n in numbers]
    gains = []
    for number, block in enumerate(blocks):
        quiet = min(around(levels.tolist(), 15, number))
        most_db = min(30.0, max(0.0, speech[number] - quiet - 6))
        gain_db = min(most_db, max(-10.0, -20 - speech[number]))
        gains.append(min(10 ** (gain_db / 20), 0.95 / max(np.abs(block).max(), 1e-6)))
    edges = [gains[0], *(min(pair) for pair in pairwise(gains)), gains[-1]]
    ramps = [np.linspace(first, last, 800, endpoint=False) for first, last in pairwise(edges)]
    return (np.concatenate(ramps) * blocks.ravel())[: len(samples)].astype(np.float32)


@pytest.mark.parametrize("seed", range(8))
def test_the_gain_of_each_block_is_decided_by_those_around(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 45, 16)
    levels = np.repeat(10 ** (rng.uniform(-75, 4, len(lengths)) / 20), lengths * BLOCK)
    samples = (levels * rng.uniform(-1, 1, len(levels))).astype(np.float32)[:-123] + np.float32(0.01)
    samples[:: 31 * BLOCK] = 0.9  # clicks
    found, expected = normalized(samples, BLOCK), by_definition(samples)
    assert np.abs(found - expected).max() < 1e-3
    assert np.corrcoef(found, expected)[0, 1] > 0.99999
