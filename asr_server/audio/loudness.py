"""Brings speech of any level, and of several levels within a file, to about the same loudness.

Used by `voice_split.py` alone: OpenAI's `chunking_strategy` normalises loudness before it looks for voices.
The default way leaves samples as they are.

The level of a place is that of the vowels around it: the morphological closing of the levels of 50 ms, which
bridges pauses (the quieter of both sides counts) and still jumps just where the loudness does. Sound is
lifted by no more than it stands above the quiet around it, so that noise stays what it is.
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

PerBlock = npt.NDArray[np.float32]


class LoudnessNormalizer:
    """Takes consecutive samples, gives as many back, 1.9 s later, which is what it holds of them."""

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
        return self._give_back(num_whole, max(0, num_whole - SEEN - 1))

    def finish(self) -> Samples:
        num_blocks = -(-len(self._held) // BLOCK)
        return self._give_back(num_blocks, num_blocks)

    def _give_back(self, num_known: int, num_given: int) -> Samples:
        """The first `num_given` blocks of those held, by the levels of the first `num_known`."""
        if not num_given:
            return np.empty(0, np.float32)
        num_samples = num_given * BLOCK
        blocks = np.zeros((num_known, BLOCK), np.float32)
        blocks.reshape(-1)[: len(self._held)] = self._held[: num_known * BLOCK]
        levels = np.concatenate([self._levels, decibels(blocks.var(axis=1))])
        gains = _gains(levels)[len(self._levels) :]
        gains = np.minimum(gains, MAX_PEAK / np.maximum(np.abs(blocks).max(axis=1), 1e-6))
        given = (blocks[:num_given] * self._ramps(gains, num_given)).reshape(-1)[: len(self._held)]
        self._levels = levels[: len(levels) - num_known + num_given][-SEEN:]
        self._held = self._held[num_samples:]
        return given

    def _ramps(self, gains: PerBlock, num_given: int) -> npt.NDArray[np.float32]:
        """[num_given, BLOCK]: between two blocks the gain is the lower of both, which keeps every peak in."""
        before = gains[0] if self._last_gain is None else self._last_gain
        self._last_gain = float(gains[num_given - 1])
        around = np.concatenate([[before], gains[: num_given + 1]])
        if len(around) == num_given + 1:  # the last block of all
            around = np.append(around, around[-1])
        edges = np.minimum(around[1:], around[:-1]).astype(np.float32)
        steps = np.linspace(0, 1, BLOCK, endpoint=False, dtype=np.float32)
        ramps: npt.NDArray[np.float32] = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * steps
        return ramps


def _gains(levels: PerBlock) -> PerBlock:
    """By which the samples of each block are to be multiplied."""
    speech = _greatest(-_greatest(-_greatest(levels, REACH), REACH), EDGE)
    quiet = -_greatest(-levels, REACH)
    lift_db = np.clip(speech - quiet - STEADY_DB, 0.0, MAX_GAIN_DB)
    gain_db = np.clip(TARGET_DB - speech, MIN_GAIN_DB, lift_db)
    return np.asarray(10 ** (gain_db / 20), np.float32)


def _greatest(values: PerBlock, reach: int) -> PerBlock:
    """Within `reach` of each."""
    padded = np.pad(values, reach, constant_values=-np.inf)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).max(axis=1), np.float32)
