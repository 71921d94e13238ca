import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import find_pauses, joined
from tests.speech import say, silence


def tone(duration_s: float, loudness: float = 0.3) -> Samples:
    time_s = np.arange(round(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    return (loudness * np.sin(2 * np.pi * 440 * time_s)).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 0.2])
def test_pauses_are_found_to_5_ms(offset: float) -> None:
    samples = np.concatenate([silence(0.3), tone(0.5), silence(0.04), tone(0.5), silence(0.2)])
    found = find_pauses(samples + np.float32(offset))
    expected = np.array([(0, 0.3), (0.8, 0.84), (1.34, 1.54)])
    np.testing.assert_allclose(found.astype(float), expected, atol=0.005)


def test_what_is_too_short_or_too_loud_is_no_pause() -> None:
    short = np.concatenate([tone(0.5), silence(0.02), tone(0.5)])
    faint = np.concatenate([tone(0.5), tone(0.08, loudness=0.005), tone(0.5)])
    assert len(find_pauses(short)) == len(find_pauses(faint)) == 0


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
