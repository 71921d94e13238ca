"""From which level on floats are integers, an offset is one, and two sides cancel out."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.audio.decoder import Block
from asr_server.audio.mono import FloatScale, Mono16k, SteadyOffset, mix_weights
from asr_server.core import Samples


def block(*loud: float, num_frames: int = 100) -> Block:
    """A mono block of zeros but for these samples."""
    samples = np.zeros((num_frames, 1), np.float32)
    samples[: len(loud), 0] = loud
    return samples


def factor(samples: Block) -> float:
    """By how much its first sample is turned down."""
    return float(samples[0, 0] / FloatScale().push(samples)[0, 0])


@pytest.mark.parametrize(
    ("loudest", "scale"),
    [
        *((1.0, 1), (2.0, 2**15), (49_152.0, 2**15), (49_156.0, 2**23), (12_582_912.0, 2**23)),
        *((12_582_914.0, 2**31), (3_221_225_472.0, 2**31)),
    ],
)
def test_whole_numbers_from_two_on_are_integers_of_the_smallest_scale(loudest: float, scale: int) -> None:
    samples = np.full((100, 1), loudest, np.float32)
    assert factor(samples) == scale


def test_floats_beyond_all_scales_are_cut_down() -> None:
    assert FloatScale().push(np.full((100, 1), 3.3e9, np.float32)).max() == 2**15
    assert FloatScale().push(block(40_000.5, 0.5, num_frames=101)).max() == 2**15
    scale, damaged = FloatScale(), block(np.nan, np.inf, -np.inf, num_frames=3)
    assert not scale.push(damaged).any()
    assert np.array_equal(scale.push(block(0.5, 0.5, num_frames=2)), block(0.5, 0.5, num_frames=2))


def test_a_hundredth_of_the_samples_beyond_four_makes_integers() -> None:
    assert factor(block(1000.5)) == 2**15
    assert factor(block(1000.5, num_frames=101)) == 1
    assert factor(block(4.0, 4.0, 0.5)) == 1
    assert factor(block(4.001, 4.001, 0.5)) == 2**15


def test_a_block_that_is_not_loud_is_left_as_it_is() -> None:
    quiet = block(2.0, 1.0)
    assert FloatScale().push(quiet) is quiet
    assert factor(block(2.0, 2.0)) == 2**15
    scale = FloatScale()
    scale.push(block(2.0, 2.0))
    assert scale.push(quiet)[0, 0] == 2 / 2**15


def tone(level: float, num_samples: int = 1600) -> Samples:
    return (level * np.sin(2 * np.pi * np.arange(num_samples) / 800)).astype(np.float32)


@pytest.mark.parametrize(
    ("offset", "level", "is_taken_away"),
    [(0.011, 0.0, True), (0.0099, 0.0, False), (-0.2, 0.28, True), (0.2, 0.285, False)],
)
def test_an_offset_is_a_hundredth_and_more_than_the_sound(
    offset: float, level: float, is_taken_away: bool
) -> None:
    samples = tone(level) + np.float32(offset)
    pushed = SteadyOffset(1600).push(samples)
    assert (pushed is samples) != is_taken_away
    if is_taken_away:
        assert np.abs(pushed - tone(level)).max() < 1e-4
        kept = SteadyOffset(1600)
        kept.push(samples)
        assert np.array_equal(kept.push(samples[:10]), pushed[:10])


def test_an_offset_stays_until_it_has_moved_by_a_hundredth() -> None:
    steady = SteadyOffset(1600)
    for level, rest in ((0.5, 0.0), (0.505, 0.005), (0.52, 0.0), (0.515, -0.005)):
        assert steady.push(np.full(1600, level, np.float32)) == pytest.approx(rest, abs=1e-6)


def test_sides_that_cancelled_out_are_added_again_once_their_difference_would_cancel() -> None:
    mono, one = Mono16k(16_000, 2), tone(0.5)
    for gain, is_inverted in ((-1.0, True), (0.5, True), (0.9, False), (-0.5, False)):
        mixed = mono.push(np.stack([one, np.float32(gain) * one], axis=1))
        assert np.abs(mixed - one * (1 - gain if is_inverted else 1 + gain) / 2).max() < 1e-6


def test_a_tenth_of_a_second_is_judged_and_no_less() -> None:
    shorter = tone(0.0, 1599) + np.float32(0.5)
    assert SteadyOffset(1600).push(shorter) is shorter
    for num_frames, is_inverted in ((1600, True), (1599, False)):
        one = tone(0.5, num_frames)
        assert Mono16k(16_000, 2).push(np.stack([one, -one], axis=1)).any() == is_inverted
        assert Mono16k(16_000, 1).push(one[:, None] * 0 + 0.5).any() != is_inverted


@pytest.mark.parametrize(("gain", "is_inverted"), [(0.73, True), (0.715, False), (-0.9, False)])
def test_sides_cancel_out_with_a_twentieth_of_their_power_in_their_sum(
    gain: float, is_inverted: bool
) -> None:
    one = tone(0.5)
    mixed = Mono16k(16_000, 2).push(np.stack([one, np.float32(-gain) * one], axis=1))
    expected = one * (1 + gain if is_inverted else 1 - gain) / 2
    assert np.abs(mixed - expected).max() < 1e-6


def test_a_channel_is_read_alone() -> None:
    frames = np.stack([tone(0.5), tone(0.25), tone(0.125)], axis=1)
    assert np.array_equal(Mono16k(16_000, 3, channel=1).push(frames), frames[:, 1])
    assert np.array_equal(Mono16k(16_000, 1, channel=1).push(frames[:, :1]), frames[:, 0])


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("FL FR FC LFE SL SR", [0.7, 0.7, 1.0, 0.0, 0.5, 0.5]),
        ("FLC FRC DL DR LFE2 TC", [0.7, 0.7, 0.7, 0.7, 0.0, 0.5]),
        *(("FC LFE", [1.0] * 3), ("LFE LFE2", [1.0, 1.0]), ("", [1.0] * 4)),
    ],
)
def test_channels_count_by_their_place(layout: str, weights: list[float]) -> None:
    found = mix_weights(len(weights), layout.split())
    assert np.allclose(found, np.array(weights) / sum(weights))
