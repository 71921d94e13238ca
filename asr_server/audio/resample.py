"""Any rate and layout to 16 kHz mono, block by block."""

from __future__ import annotations

import math

import numpy as np
import soxr

from asr_server.audio.decoders.base import Block
from asr_server.core import SAMPLE_RATE, Samples

_LOUDEST = np.float32(2.0**15)  # far beyond any scale; keeps damaged float files from overflowing


class Mono16k:
    """Mixes channels with equal weights, then resamples with soxr's HQ filter (linear phase).

    A block that is 16 kHz mono already comes back as it is, without a copy.
    """

    def __init__(self, sample_rate: int, num_channels: int) -> None:
        self._weights = np.full(num_channels, 1 / num_channels, np.float32)
        self._resampler = (
            None
            if sample_rate == SAMPLE_RATE
            else soxr.ResampleStream(sample_rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
        )

    def push(self, block: Block) -> Samples:
        """[frames, channels] in, [samples] out; the filter holds some back until `finish`."""
        mono = _finite(self._mix(block))
        return mono if self._resampler is None else self._resampler.resample_chunk(mono)

    def finish(self) -> Samples:
        empty = np.empty(0, np.float32)
        return empty if self._resampler is None else self._resampler.resample_chunk(empty, last=True)

    def _mix(self, block: Block) -> Samples:
        # A matrix product: the mean over so short an axis costs more than decoding MP3 does.
        if len(self._weights) == 1:
            return block[:, 0]
        with np.errstate(over="ignore", invalid="ignore"):
            mono: Samples = np.dot(block, self._weights)
        return mono


def _finite(mono: Samples) -> Samples:
    """Float files may hold anything; one NaN would silence the whole filter."""
    with np.errstate(over="ignore", invalid="ignore"):
        energy = float(np.dot(mono, mono))
    if math.isfinite(energy):
        return mono
    return np.clip(np.nan_to_num(mono, nan=0.0, posinf=0.0, neginf=0.0), -_LOUDEST, _LOUDEST)
