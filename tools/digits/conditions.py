"""What happens to the sequences that examine a model: telephone, noise, uneven levels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import soxr
from scipy import signal

from . import channel, noises
from .clips import SAMPLE_RATE, Wave
from .noises import Random
from .sequences import Example


def unchanged(example: Example, _: Random) -> Example:
    """As it is."""
    return example


def telephone(example: Example, _: Random) -> Example:
    """300 to 3400 Hz, 8 kHz, mu-law."""
    narrow = soxr.resample(example.wave, SAMPLE_RATE, 8000)
    filtered = signal.sosfilt(signal.butter(4, (300, 3400), "bandpass", fs=8000, output="sos"), narrow)
    coded = channel.mu_law(np.asarray(filtered, np.float32))
    wide = soxr.resample(coded, 8000, SAMPLE_RATE).astype(np.float32)
    return Example(wide[: len(example.wave)], example.said)


def noise(ratio_db: float, slopes_db_per_octave: tuple[float, ...]) -> Callable[[Example, Random], Example]:
    """Noise of one of these slopes, ``ratio_db`` below the speech (silences between digits not counted)."""

    def add(example: Example, rng: Random) -> Example:
        loud = np.concatenate([example.wave[_samples(s.start_s) : _samples(s.end_s)] for s in example.said])
        level = float(np.sqrt((loud**2).mean())) * 10 ** (-ratio_db / 20)
        sound = noises.coloured_noise(len(example.wave), float(rng.choice(slopes_db_per_octave)), rng)
        return Example(example.wave + sound * np.float32(level / noises.LEVEL), example.said)

    return add


def level_jumps(example: Example, rng: Random) -> Example:
    """Every digit 10 dB above or below its level, so that neighbours differ by 20 dB or not at all."""
    middles = [(a.end_s + b.start_s) / 2 for a, b in pairwise(example.said)]
    edges = [0, *map(_samples, middles), len(example.wave)]
    wave: Wave = example.wave.copy()
    for first, last in pairwise(edges):
        wave[first:last] *= np.float32(10 ** (rng.choice([-10, 10]) / 20))
    return Example(wave / max(1.0, float(np.abs(wave).max())), example.said)


def _samples(time_s: float) -> int:
    return int(time_s * SAMPLE_RATE)


CONDITIONS: dict[str, Callable[[Example, Random], Example]] = {
    "as it is": unchanged,
    "telephone": telephone,
    "20 dB noise": noise(20, (0.0, 3.0)),
    "10 dB white noise": noise(10, (0.0,)),
    "level jumps of 20 dB": level_jumps,
}
