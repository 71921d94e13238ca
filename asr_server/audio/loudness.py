"""Level the loudness of speech for voice detector and model, with 1.9 s of delay.

A block's level is that of the vowels around: a morphological closing of 50 ms levels bridges pauses and
follows jumps. Gain is at most the distance to the quiet around, so noise alone is never raised.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import decibels

BLOCK: Final = SAMPLE_RATE // 20  # 50 ms, of which each has a level and a gain
REACH: Final = 15  # blocks to each side: pauses of up to 1.5 s are bridged
EDGE: Final = 5  # blocks by which a word's level reaches beyond it: its faint beginning and end are its own
SEEN: Final = 2 * REACH + EDGE  # blocks to each side by which the gain of one is decided
TARGET_DB: Final = -20.0
MAX_GAIN_DB: Final = 30.0
MIN_GAIN_DB: Final = -10.0
STEADY_DB: Final = 6.0  # that the levels of steady noise lie apart
MAX_PEAK: Final = 0.95
STEPS: Final = np.linspace(0, 1, BLOCK, endpoint=False, dtype=np.float32)  # from a block to the next

PerBlock = npt.NDArray[np.float32]


class LoudnessNormalizer:
    def __init__(self) -> None:
        self._held = np.empty(0, np.float32)  # samples not given back yet
        self._levels = np.empty(0, np.float32)  # of blocks given back that those held still see
        self._last_gain: float | None = None  # of the last block given back

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, samples: Samples) -> Samples:
        self._held = np.concatenate([self._held, samples])
        num_whole = len(self._held) // BLOCK
        return self._give_back(self._held, num_whole, max(0, num_whole - SEEN - 1))

    def finish(self) -> Samples:
        num_samples, num_blocks = len(self._held), -(-len(self._held) // BLOCK)
        padded = np.pad(self._held, (0, num_blocks * BLOCK - num_samples))
        return self._give_back(padded, num_blocks, num_blocks)[:num_samples]

    def _give_back(self, held: Samples, num_known: int, num_given: int) -> Samples:
        if not num_given:
            return np.empty(0, np.float32)
        blocks = held[: num_known * BLOCK].reshape(-1, BLOCK)
        levels = np.concatenate([self._levels, decibels(_variances(blocks))])
        gains = _gains(levels)[len(self._levels) :]
        peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
        gains = np.minimum(gains, MAX_PEAK / np.maximum(peaks, 1e-6))
        given = self._ramps(gains, num_given)
        given *= blocks[:num_given]
        self._levels = levels[: len(levels) - num_known + num_given][-SEEN:]
        self._held = self._held[num_given * BLOCK :]
        return given.reshape(-1)

    def _ramps(self, gains: PerBlock, num_given: int) -> npt.NDArray[np.float32]:
        """Return gains [num_given, BLOCK]; between blocks the lower holds every peak."""
        before = gains[0] if self._last_gain is None else self._last_gain
        self._last_gain = float(gains[num_given - 1])
        around = np.concatenate([[before], gains[: num_given + 1]])
        if len(around) == num_given + 1:  # the last block of all
            around = np.append(around, around[-1])
        edges = np.minimum(around[1:], around[:-1]).astype(np.float32)
        ramps: npt.NDArray[np.float32] = np.multiply.outer(np.diff(edges), STEPS)
        ramps += edges[:-1, None]
        return ramps


def _variances(blocks: npt.NDArray[np.float32]) -> PerBlock:
    centred = blocks - (np.einsum("ij->i", blocks) / BLOCK)[:, None]  # half the time of `blocks.var(axis=1)`
    return np.asarray(np.einsum("ij,ij->i", centred, centred) / BLOCK, np.float32)


def _gains(levels: PerBlock) -> PerBlock:
    speech = _greatest(-_greatest(-_greatest(levels, REACH), REACH), EDGE)
    quiet = -_greatest(-levels, REACH)
    lift_db = np.clip(speech - quiet - STEADY_DB, 0.0, MAX_GAIN_DB)
    gain_db = np.clip(TARGET_DB - speech, MIN_GAIN_DB, lift_db)
    return np.asarray(10 ** (gain_db / 20), np.float32)


def _greatest(values: PerBlock, reach: int) -> PerBlock:
    outside = np.full(reach, -np.inf, np.float32)
    greatest = np.concatenate([outside, values, outside])
    reached = 1  # values from each on, of which it is the greatest
    while 2 * reached <= 2 * reach:
        greatest = np.maximum(greatest[:-reached], greatest[reached:])
        reached *= 2
    return np.asarray(np.maximum(greatest[: len(values)], greatest[2 * reach + 1 - reached :]), np.float32)
