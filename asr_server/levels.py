"""Measure loudness over time and find pauses.

A level is the variance within 20 ms, every 5 ms, so offset and rumble do not count. Imports no torch.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from asr_server.core import SAMPLE_RATE, Samples

HOP = SAMPLE_RATE // 200  # 5 ms
HOPS_PER_LEVEL = 4  # 20 ms
MAX_OFFSET = 1e-3
FLOOR_DB = -90.0  # the last bit of 16
# People whose recordings peak at -50 dBFS begin and end words above it: beneath is the recorder's noise.
SILENCE_DB = -78.0
MIN_PAUSE_HOPS = 6  # 30 ms
BELOW_LOUDEST = 10**-4.5  # in power, 45 dB: the faintest consonants lie some 35 dB below the loudest vowels
# Noise is what the quietest stretch is full of. A closure between words that run on is shorter than this.
HOPS_OF_NOISE = 20  # 100 ms
NOISE_BELOW_LOUDEST = 10**-1.5  # 15 dB; louder, it is rather speech without a pause
ABOVE_NOISE = 10**0.3  # 3 dB: steady noise varies by 0.4 from 20 ms to the next

SILENCE_POWER = 10 ** (SILENCE_DB / 10)
_FLOOR = np.float32(10 ** (FLOOR_DB / 10))
_AVERAGE = np.full(HOPS_PER_LEVEL, 1 / (HOPS_PER_LEVEL * HOP), np.float32)
_FEWER_HOPS = HOPS_PER_LEVEL / np.arange(HOPS_PER_LEVEL - 1, 0, -1, dtype=np.float32)
_NOISE_AVERAGE = np.full(HOPS_OF_NOISE, 1 / HOPS_OF_NOISE, np.float32)

Interval = tuple[float, float]  # start and end
Powers = npt.NDArray[np.float32]  # one every HOP samples, of the HOPS_PER_LEVEL hops from there
Pauses = npt.NDArray[np.floating]  # [count, 2]: start and end in seconds, in order


def powers(samples: Samples) -> Powers:
    """Return [len(samples) // HOP] variances; the last few are over fewer hops."""
    hops = samples[: len(samples) // HOP * HOP].reshape(-1, HOP)
    if not len(hops):
        return np.ones(min(1, len(samples)), np.float32)  # under 5 ms: nothing to tell, so not silent
    sums = np.einsum("ij->i", hops)  # four times as fast as `sum(axis=1)`
    offset = float(sums.sum()) / hops.size
    if abs(offset) > MAX_OFFSET:  # its square would drown what float32 knows of a whisper
        return powers(samples - np.float32(offset))
    means = _sliding_mean(sums)
    return _sliding_mean(np.einsum("ij,ij->i", hops, hops)) - means * means


def _sliding_mean(hop_sums: Samples) -> Samples:
    means: Samples = np.convolve(hop_sums, _AVERAGE)[HOPS_PER_LEVEL - 1 :]
    means[1 - HOPS_PER_LEVEL :] *= _FEWER_HOPS[-len(means) :]
    return means


def decibels(powers: Powers) -> Powers:
    return 10 * np.log10(np.maximum(powers, _FLOOR))


def find_pauses(samples: Samples) -> Pauses:
    levels = powers(samples)
    if not len(levels):
        return np.empty((0, 2))
    quiet = levels < _quiet_power(levels)
    pauses = runs(quiet)
    pauses[:, 1] = np.minimum(pauses[:, 1] + HOPS_PER_LEVEL - 1, len(levels))  # a level is of what follows
    return pauses[pauses[:, 1] - pauses[:, 0] >= MIN_PAUSE_HOPS] * (HOP / SAMPLE_RATE)


def _quiet_power(levels: Powers) -> float:
    loudest = float(levels.max())
    quiet = max(SILENCE_POWER, BELOW_LOUDEST * loudest)
    if len(levels) < HOPS_OF_NOISE:
        return quiet
    noise = float(np.convolve(levels, _NOISE_AVERAGE, mode="valid").min())
    return max(quiet, ABOVE_NOISE * noise) if noise < NOISE_BELOW_LOUDEST * loudest else quiet


def runs(flags: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Return [num_runs, 2]: each run's first index, and the one after its last."""
    return np.flatnonzero(np.diff(np.asarray(flags, bool), prepend=False, append=False)).reshape(-1, 2)


def joined(intervals: Iterable[Interval], max_gap: float = 0.0) -> list[Interval]:
    """Order intervals by start, and join those at most `max_gap` apart."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start - result[-1][1] <= max_gap:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result
