import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import HOP, find_pauses, joined, powers
from tests.support.speech import say, silence


def tone(duration_s: float) -> Samples:
    time_s = np.arange(round(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.3 * np.sin(2 * np.pi * 440 * time_s)).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 0.2])
def test_pauses_are_found_to_5_ms(offset: float) -> None:
    samples = np.concatenate([silence(0.3), tone(0.5), silence(0.04), tone(0.5), silence(0.2)])
    found = find_pauses(samples + np.float32(offset))
    expected = np.array([(0, 0.3), (0.8, 0.84), (1.34, 1.54)])
    np.testing.assert_allclose(found.astype(float), expected, atol=0.005)


@pytest.mark.parametrize("num_samples", [0, 1, 79, 80])
def test_next_to_nothing_has_no_pauses_or_one(num_samples: int) -> None:
    assert find_pauses(np.zeros(num_samples, np.float32)).shape == (0, 2)


def test_the_gaps_between_spoken_digits_are_pauses() -> None:
    spoken = say("0427", gap_s=0.1)
    pauses = find_pauses(spoken.samples)
    for (_, end_s), (start_s, _) in zip(spoken.times, spoken.times[1:], strict=False):
        middle_s = (start_s + end_s) / 2
        assert any(first_s < middle_s < last_s for first_s, last_s in pauses.tolist())


def test_a_pause_full_of_steady_noise_is_one() -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, round(1.7 * SAMPLE_RATE)).astype(np.float32)
    sound = np.concatenate([tone(0.5), silence(0.2), tone(0.5), silence(0.5)])
    expected = np.array([(0.5, 0.7), (1.2, 1.7)])
    np.testing.assert_allclose(find_pauses(sound + noise).astype(float), expected, atol=0.02)
    assert len(find_pauses(tone(1.7) + noise)) == 0, "speech that never stops is no noise"


def test_stretches_that_touch_or_are_near_are_joined_whatever_their_order() -> None:
    stretches = [(5.0, 6.0), (1.0, 3.0), (1.5, 2.0), (3.0, 4.0)]
    assert joined(stretches) == [(1.0, 4.0), (5.0, 6.0)]
    assert joined(stretches, max_gap=1.0) == [(1.0, 6.0)]
    assert joined([]) == []


PLUS_MINUS = np.array([1, -1], np.float32)


def steady(power: float, duration_s: float) -> Samples:
    """Sound whose level is the same all over."""
    return np.resize(PLUS_MINUS, round(duration_s * SAMPLE_RATE)) * np.float32(power**0.5)


def test_an_offset_and_a_slow_rumble_are_no_sound() -> None:
    whisper = np.random.default_rng(0).normal(0, 1e-4, SAMPLE_RATE // 2).astype(np.float32)
    expected = powers(whisper)
    for offset in (0.5, -0.5, 0.0009, 0.0011):
        np.testing.assert_allclose(powers(whisper + np.float32(offset)), expected, rtol=0.05, atol=1e-10)
    assert powers(np.full(HOP * 8, 0.25, np.float32)).max() < 1e-12


def pauses_in(*parts: Samples) -> list[tuple[float, float]]:
    return [(round(start, 4), round(end, 4)) for start, end in find_pauses(np.concatenate(parts)).tolist()]


@pytest.mark.parametrize(("gap_s", "num_pauses"), [(0.025, 0), (0.03, 1), (0.05, 1)])
def test_the_shortest_pause_has_30_ms(gap_s: float, num_pauses: int) -> None:
    found = pauses_in(tone(0.5), silence(gap_s), tone(0.5))
    assert found == [(0.5, round(0.5 + gap_s, 4))] * num_pauses


@pytest.mark.parametrize(
    ("below_db", "duration_s", "is_pause"),
    [(14.9, 0.2, False), (15.1, 0.2, True), (15.1, 0.115, True), (15.1, 0.11, False)],
)
def test_noise_lasts_100_ms_15_db_below_speech(below_db: float, duration_s: float, is_pause: bool) -> None:
    """Levels are of 20 ms: the last three of a stretch have speech in them."""
    noise = steady(10 ** (-below_db / 10), duration_s)
    expected = [(0.2, round(0.2 + duration_s, 4))] if is_pause else []
    assert pauses_in(steady(1.0, 0.2), noise, steady(1.0, 0.2)) == expected
