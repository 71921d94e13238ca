"""The scale of floats, the downmix and the resampler, each against float64."""

import numpy as np
import pytest
import scipy.signal

from asr_server.audio.stream import FloatScale, Mono16k, To16k
from asr_server.core import Samples
from tests.unit.audio.audio_files import Frames, voice


def converted(frames: Frames, sample_rate: int, block_frames: int = 65_536, layout: str = "") -> Samples:
    mono, scale = Mono16k(sample_rate, frames.shape[1], layout.split()), FloatScale()
    starts = range(0, len(frames), block_frames)
    blocks = [np.array(mono.push(scale.push(frames[at : at + block_frames]))) for at in starts]
    return np.concatenate([*blocks, mono.finish()])


def reference(frames: Frames, sample_rate: int) -> np.ndarray:
    """Mean over channels and a long windowed-sinc filter, all in float64."""
    mono = frames.astype(np.float64).mean(axis=1)
    common = np.gcd(sample_rate, 16_000)
    up, down = 16_000 // common, sample_rate // common
    # Pass band to 0.9 of the lower Nyquist frequency, 140 dB of attenuation from 1.0 on.
    taps = scipy.signal.firwin(128 * max(up, down) + 1, 0.95 / max(up, down), window=("kaiser", 14.0))
    return np.asarray(scipy.signal.resample_poly(mono, up, down, window=taps))


@pytest.mark.parametrize(
    "sample_rate", [8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000]
)
def test_resampling_agrees_with_float64(sample_rate: int) -> None:
    frames = voice(sample_rate, 2, 3.0)
    samples, expected = converted(frames, sample_rate), reference(frames, sample_rate)
    middle = slice(1600, 46_400)  # the ends depend on what a filter assumes beyond them
    assert np.sqrt(np.mean((samples[middle] - expected[middle]) ** 2)) < 1e-4


@pytest.mark.parametrize("num_channels", [1, 2, 3, 6, 8])
def test_every_channel_has_the_same_weight_where_no_layout_is_stated(num_channels: int) -> None:
    frames = voice(16_000, num_channels, 1.0)
    assert np.abs(converted(frames, 16_000) - frames.astype(np.float64).mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize("sample_rate", [8_000, 16_000, 44_100])
def test_channels_kept_apart_are_each_as_if_alone(sample_rate: int) -> None:
    frames = voice(sample_rate, 2, 3.0)
    stereo = To16k(sample_rate, 2)
    blocks = [stereo.push(frames[at : at + 4097]) for at in range(0, len(frames), 4097)]
    apart = np.concatenate([*blocks, stereo.finish()])
    for channel in (0, 1):
        assert np.array_equal(apart[:, channel], converted(frames[:, channel, None], sample_rate, 4097))


@pytest.mark.parametrize(
    "sample_rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000, 37_800]
)
@pytest.mark.parametrize("num_frames", [1, 1000, 44_100, 123_457])
def test_the_length_is_exact_within_one_sample(sample_rate: int, num_frames: int) -> None:
    samples = converted(np.zeros((num_frames, 1), np.float32), sample_rate)
    assert abs(len(samples) - num_frames * 16_000 / sample_rate) <= 1


@pytest.mark.parametrize("sample_rate", [16_000, 44_100, 48_000])
def test_full_scale_is_neither_clipped_nor_attenuated(sample_rate: int) -> None:
    times = np.arange(sample_rate) / sample_rate
    tone = np.sin(2 * np.pi * 997 * times).astype(np.float32)
    samples = converted(np.stack([tone, tone], axis=1), sample_rate)[1600:-1600]
    assert np.abs(samples).max() == pytest.approx(1.0, abs=1e-3)
    steps = np.where(np.arange(sample_rate) // (sample_rate // 50) % 2, 1.0, -1.0).astype(np.float32)
    assert np.abs(converted(steps[:, None], sample_rate)).max() >= 1.0  # overshoot is kept, not clipped


@pytest.mark.parametrize("block_frames", [1, 160, 4097])
def test_blocks_of_any_size_give_the_same_samples(block_frames: int) -> None:
    frames = voice(44_100, 2, 0.25)
    difference = converted(frames, 44_100, block_frames) - converted(frames, 44_100)
    assert np.abs(difference).max() < 1e-6


def test_damaged_floats_harm_only_themselves() -> None:
    frames = voice(48_000, 1, 1.0).copy()
    frames[1000:1003, 0] = [np.nan, np.inf, 3e38]
    samples = converted(frames, 48_000)
    assert np.isfinite(samples).all()
    assert np.abs(samples[1000:] - converted(voice(48_000, 1, 1.0), 48_000)[1000:]).max() < 1e-5


@pytest.mark.parametrize("loudness", [1e17, 3e38])
def test_floats_too_large_for_the_model_are_cut_down_however_few(loudness: float) -> None:
    samples = converted(voice(16_000, 1, 0.1) * np.float32(loudness), 16_000)
    assert np.abs(samples).max() <= 2.0**15


SURROUND = "FL FR FC LFE SL SR"


def test_dialogue_in_the_centre_stands_above_effects_around_it() -> None:
    frames = np.zeros((16_000, 6), np.float32)
    speech, others = voice(16_000, 1, 1.0)[:, 0], voice(16_000, 6, 1.0)
    for channel in (0, 1, 4, 5):
        frames[:, channel] = others[:, channel]
    frames[:, 3] = 0.9
    frames[:, 2] = speech
    weights = np.array([0.7, 0.7, 1.0, 0.0, 0.5, 0.5]) / 3.4
    assert np.abs(converted(frames, 16_000, layout=SURROUND) - frames @ weights).max() < 1e-6


@pytest.mark.parametrize("gain", [1.0, 0.75])
@pytest.mark.parametrize("sample_rate", [16_000, 48_000])
def test_a_side_that_is_inverted_does_not_silence_the_other(gain: float, sample_rate: int) -> None:
    one = voice(sample_rate, 1, 3.0)
    rng = np.random.default_rng(5)
    frames = np.concatenate([one, -gain * one], axis=1) + rng.normal(0, 1e-4, (len(one), 2)).astype(
        np.float32
    )
    samples, expected = converted(frames, sample_rate), converted(one, sample_rate) * (1 + gain) / 2
    assert np.abs(samples - expected).max() < 0.01


def test_sides_that_are_inverted_midway_and_back_are_heard_throughout() -> None:
    one = voice(16_000, 1, 12.0)
    signs = np.repeat([1.0, -1.0, 1.0], len(one) // 3).astype(np.float32)[:, None]
    samples = converted(np.concatenate([one, signs * one], axis=1), 16_000, 8_000)
    assert np.abs(np.abs(samples) - np.abs(one[:, 0])).max() < 1e-5


@pytest.mark.parametrize("num_channels", [1, 2])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**23, 2.0**31])
def test_floats_at_the_scale_of_integers_are_scaled_down(scale: float, num_channels: int) -> None:
    frames = np.concatenate([np.zeros((4000, num_channels), np.float32), voice(16_000, num_channels, 2.0)])
    whole = np.round(frames * np.float32(scale))
    assert np.abs(converted(whole, 16_000, 4096) - converted(frames, 16_000)).max() < 1e-4
    resampled = frames * np.float32(scale) * np.float32(0.999)
    assert np.abs(converted(resampled, 16_000, 4096) - converted(frames, 16_000)).max() < 1e-3


def test_quiet_whole_numbers_before_speech_are_not_taken_for_full_scale() -> None:
    quiet = np.random.default_rng(3).integers(-3, 4, (16_000, 1)).astype(np.float32)
    frames = np.concatenate([quiet, voice(16_000, 1, 1.0) * np.float32(2**15)])
    assert np.abs(converted(frames, 16_000, 4096)[:16_000]).max() <= 3 / 2**15


@pytest.mark.parametrize("gain", [2.0, 9.0])
def test_floats_beyond_full_scale_keep_their_level(gain: float) -> None:
    frames = voice(16_000, 1, 1.0) * np.float32(gain)
    assert np.array_equal(converted(frames, 16_000), frames[:, 0])


BUMP = np.tile([12.0, -12.0], 2400).astype(np.float32)  # 0.3 s against the microphone
GARBAGE = np.random.default_rng(4).integers(0, 256, 4 * 4096, np.uint8).view(np.float32)
INTEGERS = np.round(voice(16_000, 1, 0.3)[:, 0] * np.float32(2**15))


@pytest.mark.parametrize("start", [0, 16_384])
@pytest.mark.parametrize("block", [BUMP, GARBAGE, INTEGERS], ids=["bump", "garbage", "integers"])
def test_one_block_does_not_turn_the_rest_down(block: Samples, start: int) -> None:
    frames = np.concatenate([voice(16_000, 1, 1.0)] * 4)
    frames[start : start + len(block), 0] = block
    end = start + len(block) + 3 * 4096
    assert np.array_equal(converted(frames, 16_000, 4096)[end:], frames[end:, 0])


def test_an_offset_larger_than_the_sound_is_taken_away_also_where_it_changes() -> None:
    quiet = 0.01 * voice(16_000, 1, 6.0)
    offset = np.where(np.arange(len(quiet)) < 65_536, 0.5, -0.3).astype(np.float32)[:, None]
    assert np.abs(converted(quiet + offset, 16_000) - quiet[:, 0]).max() < 1e-3
    loud = voice(16_000, 1, 3.0) + np.float32(0.02)
    assert np.array_equal(converted(loud, 16_000), loud[:, 0]), "a small one stays"


def test_a_channel_is_read_alone() -> None:
    frames = voice(16_000, 3, 0.5)
    assert np.array_equal(Mono16k(16_000, 3, channel=1).push(frames), frames[:, 1])
    assert np.array_equal(Mono16k(16_000, 1, channel=1).push(frames[:, :1]), frames[:, 0])
