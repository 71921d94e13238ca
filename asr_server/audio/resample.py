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
        self._resampler = (
            None
            if sample_rate == SAMPLE_RATE
            else soxr.ResampleStream(sample_rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
        )

    def push(self, block: Block) -> Samples:
        """[frames, channels] in, [samples] out; the filter holds some back until `finish`."""
        with np.errstate(over="ignore", invalid="ignore"):  # damaged float files
            mono = _finite(_mixed(block))
        return mono if self._resampler is None else self._resampler.resample_chunk(mono)

    def finish(self) -> Samples:
        empty = np.empty(0, np.float32)
        return empty if self._resampler is None else self._resampler.resample_chunk(empty, last=True)


def _mixed(block: Block) -> Samples:
    """The mean over channels. `block.mean(axis=1)` costs more than decoding MP3 does, and a matrix product
    may wake BLAS's own threads, which then fight with ours.
    """
    num_channels = block.shape[1]
    if num_channels == 1:
        return block[:, 0]
    mono: Samples = block[:, 0] + block[:, 1]
    for channel in range(2, num_channels):
        mono += block[:, channel]
    mono *= np.float32(1 / num_channels)
    return mono


def _finite(mono: Samples) -> Samples:
    """Float files may hold anything; one NaN would silence the whole filter."""
    if math.isfinite(float(np.einsum("i,i->", mono, mono))):
        return mono
    return np.clip(np.nan_to_num(mono, nan=0.0, posinf=0.0, neginf=0.0), -_LOUDEST, _LOUDEST)
