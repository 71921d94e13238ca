"""New speakers out of old ones: what a manner changes, and what lies between two speakers."""

from __future__ import annotations

import numpy as np
import pytest

from tools.digits.clips import SAMPLE_RATE, Samples
from tools.digits.noises import Random

pytest.importorskip("pyworld", reason="needs the extra [train]")

from tools.digits.blend import blended
from tools.digits.vary import Analysis, Manner, analyse, speak

PLAIN = Manner(1, 1, 1, 1, 1, tilt_db_per_octave=0, breath=0)


def buzz(pitch_hz: float, formant_hz: float, duration_s: float = 0.4) -> Samples:
    """A vowel of one formant."""
    times_s = np.arange(int(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    harmonics_hz = np.arange(1, 40) * pitch_hz
    levels = np.exp(-(((harmonics_hz - formant_hz) / 300) ** 2)) + 0.01
    wave = (levels[:, None] * np.sin(2 * np.pi * harmonics_hz[:, None] * times_s)).sum(axis=0)
    return np.asarray(wave / np.abs(wave).max() * 12_000, np.int16)


def formant_hz(parts: Analysis) -> float:
    """Where the spectrum is strongest in the middle of the sound."""
    return float(
        parts.envelope[len(parts.f0) // 2].argmax() * SAMPLE_RATE / 2 / (parts.envelope.shape[1] - 1)
    )


def pitch_hz(parts: Analysis) -> float:
    return float(np.median(parts.f0[parts.f0 > 0]))


@pytest.fixture
def rng() -> Random:
    return np.random.default_rng(5)


def test_a_manner_moves_pitch_and_formants_each_by_its_factor(rng: Random) -> None:
    spoken = analyse(speak(analyse(buzz(120, 1500)), Manner(1.5, 1.0, 1.2, 1, 1, 0, 0), rng))
    assert pitch_hz(spoken) == pytest.approx(180, rel=0.05)
    assert 1550 < formant_hz(spoken) < 1850  # 1.5 kHz lies between the two factors' places


def test_a_tempo_makes_speech_longer_whatever_its_course_within(rng: Random) -> None:
    slow = speak(analyse(buzz(120, 800)), Manner(1, 1, 1, 0.5, 1, 0, 0), rng)
    assert len(slow) / SAMPLE_RATE == pytest.approx(0.8, abs=0.03)


def test_a_blend_lies_between_its_two_speakers(rng: Random) -> None:
    low, high = analyse(buzz(100, 700)), analyse(buzz(200, 700, duration_s=0.6))
    half = np.full(low.envelope.shape[1], 0.5)
    middle = analyse(speak(blended(low, high, half), PLAIN, rng))
    assert pitch_hz(middle) == pytest.approx(141, rel=0.05)
    assert formant_hz(middle) == pytest.approx(700, abs=100)


def test_a_blend_without_any_of_the_other_is_the_first_speaker() -> None:
    low, high = analyse(buzz(100, 700)), analyse(buzz(200, 1500))
    same = blended(low, high, np.zeros(low.envelope.shape[1]))
    np.testing.assert_allclose(same.envelope, low.envelope)
    np.testing.assert_allclose(same.f0, low.f0)
