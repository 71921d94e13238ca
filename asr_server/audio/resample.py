"""Converts blocks of any sample rate to 16 kHz, their channels mixed or kept apart. Used by `stream.py`."""

from __future__ import annotations

import numpy as np
import soxr

from asr_server.audio.decoders.base import Block
from asr_server.core import SAMPLE_RATE, Samples

_LOUDEST = np.float32(2.0**15)  # far beyond any scale; keeps damaged float files from overflowing


class Mono16k:
    """Mixes channels with equal weights, then resamples with soxr's HQ filter (linear phase).

    A block that is 16 kHz mono already comes back as it is. The next `push` may use the memory again.
    """

    def __init__(self, sample_rate: int, num_channels: int, is_float: bool = True) -> None:
        """`is_float`: the samples may be anything, NaN included."""
        self._num_channels, self._is_float = num_channels, is_float
        self._mono = np.empty(0, np.float32)
        self._resampler = _resampler(sample_rate, 1)

    def push(self, block: Block) -> Samples:
        """[frames, channels] in, [samples] out; the filter holds some back until `finish`."""
        mono = block[:, 0] if self._num_channels == 1 else self._mixed(block)
        if self._is_float:
            mono = _finite(mono)
        return mono if self._resampler is None else self._resampler.resample_chunk(mono)

    def finish(self) -> Samples:
        return _rest(self._resampler, np.empty(0, np.float32))

    def _mixed(self, block: Block) -> Samples:
        """The mean over channels. `block.mean(axis=1)` costs more than decoding MP3 does, and a matrix
        product may wake BLAS's own threads, which then fight with ours.
        """
        if len(block) > len(self._mono):
            self._mono = np.empty(len(block), np.float32)
        mono = self._mono[: len(block)]
        with np.errstate(over="ignore", invalid="ignore"):  # damaged float files
            np.add(block[:, 0], block[:, 1], out=mono)
            for channel in range(2, self._num_channels):
                np.add(mono, block[:, channel], out=mono)
            return np.multiply(mono, np.float32(1 / self._num_channels), out=mono)


class Stereo16k:
    """Keeps two channels apart: each is resampled as `Mono16k` would resample it alone."""

    def __init__(self, sample_rate: int, is_float: bool = True) -> None:
        self._is_float = is_float
        self._resampler = _resampler(sample_rate, 2)

    def push(self, block: Block) -> Samples:
        """[frames, 2] in, [samples, 2] out; the filter holds some back until `finish`."""
        block = _finite(block) if self._is_float else block
        return (
            np.ascontiguousarray(block) if self._resampler is None else self._resampler.resample_chunk(block)
        )

    def finish(self) -> Samples:
        return _rest(self._resampler, np.empty((0, 2), np.float32))


def _resampler(sample_rate: int, num_channels: int) -> soxr.ResampleStream | None:
    if sample_rate == SAMPLE_RATE:
        return None
    return soxr.ResampleStream(sample_rate, SAMPLE_RATE, num_channels, dtype="float32", quality="HQ")


def _rest(resampler: soxr.ResampleStream | None, empty: Samples) -> Samples:
    return empty if resampler is None else resampler.resample_chunk(empty, last=True)


def _finite(samples: Samples) -> Samples:
    """One NaN would silence the whole filter; and of numbers too large the model makes infinity and NaN."""
    flat = samples.ravel(order="K")  # no copy
    with np.errstate(over="ignore", invalid="ignore"):
        if np.einsum("i,i->", flat, flat) <= _LOUDEST**2:  # then none of them is larger
            return samples
    return np.clip(np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0), -_LOUDEST, _LOUDEST)
