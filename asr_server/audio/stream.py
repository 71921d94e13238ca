"""Reads a file as blocks (arrays of samples) of 16 kHz, mixed or two channels apart, and checks limits.

Runs in the preprocess threads of the API process for `recording.py`, and in the FFmpeg processes. Realtime
sessions use its resampler. Knows no requests, and no event loop.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import soxr

from asr_server.audio.decoders import Block, Decoder
from asr_server.audio.limits import AudioLimits
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.errors import InvalidAudio, NotStereo

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
    """Samples without NaN and huge values: one NaN would silence the filter, a huge one upsets the model."""
    flat = samples.ravel(order="K")  # no copy
    with np.errstate(over="ignore", invalid="ignore"):
        if np.einsum("i,i->", flat, flat) <= _LOUDEST**2:  # then none of them is larger
            return samples
    return np.clip(np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0), -_LOUDEST, _LOUDEST)


class Stream(Protocol):
    """The file as `Recording` reads it, whether the decoder is in this process or in one of its own."""

    @property
    def truncated(self) -> bool: ...

    @property
    def duration_s(self) -> float | None:
        """The length that the file's header states, known once the first block is read."""
        ...

    def read(self) -> Samples | None:
        """The next block, [samples] or with channels apart [samples, 2], perhaps empty; None is the end. The
        next call may use its memory again.
        """
        ...

    def close(self) -> None: ...


class DecodedStream:
    """A decoder in this process."""

    def __init__(self, decoder: Decoder, limits: AudioLimits, split_channels: bool = False) -> None:
        limits.check_layout(decoder.sample_rate, decoder.num_channels)
        self._decoder, self._limits = decoder, limits
        self._to_16k = _stereo(decoder) if split_channels else _mono(decoder)
        self._num_bytes = self._num_samples = 0
        self._blocks: Iterator[Samples] = itertools.chain(self.body(), self.tail())

    @property
    def truncated(self) -> bool:
        return self._decoder.truncated

    @property
    def duration_s(self) -> float | None:
        return self._decoder.duration_s

    @property
    def has_more(self) -> bool:
        return self._decoder.has_more

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def body(self) -> Iterator[Samples]:
        """Everything but the last few samples."""
        while len(block := self._decoder.read()):
            self._num_bytes += block.nbytes
            yield self._counted(self._to_16k.push(block))

    def tail(self) -> Iterator[Samples]:
        """The last few samples, which the resampling filter holds back until it knows what follows."""
        yield self._counted(self._to_16k.finish())

    def close(self) -> None:
        self._blocks = iter(())  # the generator and this object hold each other, and the decoder's memory
        self._decoder.close()

    def _counted(self, samples: Samples) -> Samples:
        self._num_samples += len(samples)
        self._limits.check_decoded(self._num_bytes, self._num_samples / SAMPLE_RATE)
        return samples


def _mono(decoder: Decoder) -> Mono16k:
    return Mono16k(decoder.sample_rate, decoder.num_channels, decoder.is_float)


def _stereo(decoder: Decoder) -> Stereo16k:
    if decoder.num_channels != 2:
        plural = "" if decoder.num_channels == 1 else "s"
        raise NotStereo(
            f"channels=split takes files of two channels, a speaker in each; this one has "
            f"{decoder.num_channels} channel{plural}."
        )
    return Stereo16k(decoder.sample_rate, decoder.is_float)


class FallbackStream:
    """A decoder in this process, and another stream that reads on where it stops before the file does.

    libsndfile gives up at damage, and at the end of the first of several MP3s joined together; FFmpeg goes
    on. The other stream starts again from the beginning: what has been read already is left out.
    """

    def __init__(self, stream: DecodedStream, open_fallback: Callable[[], Stream]) -> None:
        self._stream, self._open_fallback = stream, open_fallback
        self._fallback: Stream | None = None
        self._blocks = self._read()

    @property
    def truncated(self) -> bool:
        return self._stream.truncated or (self._fallback is not None and self._fallback.truncated)

    @property
    def duration_s(self) -> float | None:
        return self._stream.duration_s

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def close(self) -> None:
        self._blocks = iter(())
        self._stream.close()
        if self._fallback:
            self._fallback.close()

    def _read(self) -> Iterator[Samples]:
        num_read = num_fallback = 0
        for samples in self._stream.body():
            num_read += len(samples)
            yield samples
        for samples in self._read_fallback():
            num_already = min(len(samples), max(0, num_read - num_fallback))
            num_fallback += len(samples)
            yield samples[num_already:]
        if num_fallback <= num_read:
            yield from self._stream.tail()

    def _read_fallback(self) -> Iterator[Samples]:
        if not self._stream.has_more:
            return
        self._fallback = self._open_fallback()
        with contextlib.suppress(InvalidAudio):
            while (samples := self._fallback.read()) is not None:
                yield samples
