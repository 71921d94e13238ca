"""The reference for who speaks when: it ends where a voice does, not where the room's echo of it is gone."""

import numpy as np
import pytest
from scipy.signal import fftconvolve

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.speech_times import speech_of

BURSTS_S = [(0.5, 1.5), (2.2, 3.0), (3.5, 5.0)]
DURATION_S = 8.0


def bursts() -> Samples:
    """Noise whose loudness goes up and down as that of syllables does."""
    rng = np.random.default_rng(0)
    at_s = np.arange(int(DURATION_S * SAMPLE_RATE)) / SAMPLE_RATE
    is_loud = np.any([(start <= at_s) & (at_s < end) for start, end in BURSTS_S], axis=0)
    syllables = 0.6 + 0.4 * np.sin(2 * np.pi * 4 * at_s)
    return np.asarray(0.1 * rng.standard_normal(len(at_s)) * syllables * is_loud, np.float32)


def in_a_hall(samples: Samples, falls_db_s: float, below_db: float) -> Samples:
    """With an echo that falls evenly, and has so much less energy than the sound itself."""
    rng = np.random.default_rng(1)
    at_s = np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE
    echo = rng.standard_normal(len(at_s)) * 10 ** (-falls_db_s * at_s / 20)
    echo *= 10 ** (-below_db / 20) / np.sqrt((echo**2).sum())
    echo[0] += 1
    return np.asarray(fftconvolve(samples, echo)[: len(samples)], np.float32)


def worst_s(found: list[tuple[float, float]]) -> float:
    assert len(found) == len(BURSTS_S)
    return float(np.abs(np.array(found) - np.array(BURSTS_S)).max())


def test_without_an_echo_speech_is_where_it_is_loud() -> None:
    assert worst_s(speech_of(bursts())) < 0.02


@pytest.mark.parametrize(("falls_db_s", "below_db"), [(33.0, 10.0), (33.0, 15.0), (60.0, 8.0)])
def test_an_echo_is_no_speech(falls_db_s: float, below_db: float) -> None:
    assert worst_s(speech_of(in_a_hall(bursts(), falls_db_s, below_db))) < 0.1


def test_short_pauses_are_speech_and_clicks_are_not() -> None:
    samples = bursts()
    samples[int(1.0 * SAMPLE_RATE) : int(1.2 * SAMPLE_RATE)] = 0
    samples[int(6.0 * SAMPLE_RATE) : int(6.05 * SAMPLE_RATE)] = 0.1
    assert worst_s(speech_of(samples)) < 0.02
