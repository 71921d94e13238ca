"""Decodes WAV: RIFF and RF64, extensible headers, and streams whose size was never filled in.

Sources: Multimedia Programming Interface and Data Specifications 1.0 (RIFF), EBU Tech 3306 (RF64).
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.audio.decoders.base import Block, CannotOpen
from asr_server.audio.g711 import A_LAW, MU_LAW
from asr_server.core import Samples

BLOCK_BYTES = 1 << 19
MAX_CHUNKS = 256  # before the samples; a file may claim millions of empty ones
_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
# Left by streaming writers.
_UNKNOWN_SIZES = (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF - 36, 0x80000000)

Bytes = npt.NDArray[np.uint8]
Convert = Callable[[Bytes, Samples], None]  # from the file's samples to as many floats


class _Format(NamedTuple):
    tag: int
    num_channels: int
    sample_rate: int
    block_align: int
    bits: int


class WavDecoder:
    def __init__(self, fd: int) -> None:
        """Raises CannotOpen where the file is no WAV, or one of a kind that only FFmpeg knows."""
        self.fd = fd
        self.truncated = self.has_more = False
        wav_format, self._offset, self._end = _read_header(fd)
        self.sample_rate, self.num_channels = wav_format.sample_rate, wav_format.num_channels
        self.is_float = wav_format.tag == _FLOAT
        self._convert, self._sample_bytes = _converter(wav_format)
        self._frame_bytes = self._sample_bytes * self.num_channels
        if not self.num_channels or wav_format.block_align != self._frame_bytes:
            raise CannotOpen("block alignment and sample size disagree")
        self.duration_s: float | None = self._known_duration_s()
        self._data = np.empty(max(1, BLOCK_BYTES // self._frame_bytes) * self._frame_bytes, np.uint8)
        self._samples = np.empty(len(self._data) // self._sample_bytes, np.float32)

    def read(self) -> Block:
        data = self._data[: self._end - self._offset]
        num_bytes = os.preadv(self.fd, [data.data], self._offset)
        self._offset += num_bytes
        if not num_bytes and self._offset < self._end < _NO_END:
            self.truncated = True
        whole = num_bytes - num_bytes % self._frame_bytes  # a last frame cut in the middle is dropped
        samples = self._samples[: whole // self._sample_bytes]
        self._convert(data[:whole], samples)
        return samples.reshape(-1, self.num_channels)

    def close(self) -> None:
        pass

    def _known_duration_s(self) -> float:
        """A header that gives no size, or too large a one, counts as far as the file goes."""
        end = min(self._end, os.fstat(self.fd).st_size)
        return max(0, end - self._offset) / (self._frame_bytes * max(1, self.sample_rate))


_NO_END = 1 << 62


def _read_header(fd: int) -> tuple[_Format, int, int]:
    """Format, and where the samples begin and end."""
    magic = os.pread(fd, 12, 0)
    if magic[:4] not in (b"RIFF", b"RF64", b"BW64") or magic[8:12] != b"WAVE":
        raise CannotOpen("not a RIFF/WAVE file")
    wav_format, long_size = None, None
    for name, size, offset in itertools.islice(_chunks(fd), MAX_CHUNKS):
        if name == b"ds64":
            long_size = struct.unpack("<8xQ", os.pread(fd, 16, offset).ljust(16, b"\0"))[0]
        elif name == b"fmt ":
            wav_format = _parse_format(os.pread(fd, min(size, 40), offset))
        elif name == b"data" and wav_format:
            return wav_format, offset, _data_end(offset, size, long_size)
    raise CannotOpen("no samples in it")


def _chunks(fd: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, size, offset of the content) of each RIFF chunk."""
    offset = 12
    while len(head := os.pread(fd, 8, offset)) == 8:
        name, size = struct.unpack("<4sI", head)
        yield name, size, offset + 8
        offset += 8 + size + size % 2


def _data_end(offset: int, size: int, long_size: int | None) -> int:
    if size == 0xFFFFFFFF and long_size:
        return offset + long_size
    return _NO_END if size in _UNKNOWN_SIZES else offset + size


def _parse_format(content: bytes) -> _Format:
    if len(content) < 16:
        raise CannotOpen("its format chunk is too short")
    tag, num_channels, sample_rate, _, block_align, bits = struct.unpack_from("<HHIIHH", content)
    if tag == _EXTENSIBLE and len(content) >= 26:
        tag = struct.unpack_from("<H", content, 24)[0]
    return _Format(tag, num_channels, sample_rate, block_align, bits)


def _converter(wav_format: _Format) -> tuple[Convert, int]:
    """How bytes become samples, and how many bytes one sample has."""
    sample_bytes = (wav_format.bits + 7) // 8
    if wav_format.tag in (_ALAW, _MULAW) and sample_bytes == 1:
        return _looked_up(A_LAW if wav_format.tag == _ALAW else MU_LAW), 1
    converters = _FLOAT_CONVERTERS if wav_format.tag == _FLOAT else _PCM_CONVERTERS
    if wav_format.tag not in (_PCM, _FLOAT) or sample_bytes not in converters:
        raise CannotOpen(f"codec {wav_format.tag} with {wav_format.bits} bits")
    return converters[sample_bytes], sample_bytes


def _scaled(dtype: str, full_scale: float) -> Convert:
    scale = np.float32(1 / full_scale)

    def convert(data: Bytes, samples: Samples) -> None:
        np.multiply(data.view(dtype), scale, out=samples, casting="same_kind")

    return convert


def _cast(dtype: str) -> Convert:
    def convert(data: Bytes, samples: Samples) -> None:
        with np.errstate(over="ignore"):  # what is beyond float32 becomes infinity, and is dealt with as such
            samples[:] = data.view(dtype)

    return convert


def _looked_up(table: Samples) -> Convert:
    def convert(data: Bytes, samples: Samples) -> None:
        samples[:] = table[data]

    return convert


def _from_8_bit(data: Bytes, samples: Samples) -> None:
    np.subtract(data, np.float32(128), out=samples)
    np.multiply(samples, np.float32(1 / 128), out=samples)


def _from_24_bit(data: Bytes, samples: Samples) -> None:
    """Three bytes into the upper part of 32 bits, so that the sign comes along."""
    wide = np.zeros((len(samples), 4), np.uint8)
    wide[:, 1:] = data.reshape(-1, 3)
    np.multiply(wide.view("<i4")[:, 0], np.float32(2.0**-31), out=samples, casting="same_kind")


_PCM_CONVERTERS: dict[int, Convert] = {
    1: _from_8_bit,
    2: _scaled("<i2", 2.0**15),
    3: _from_24_bit,
    4: _scaled("<i4", 2.0**31),
}
_FLOAT_CONVERTERS: dict[int, Convert] = {4: _cast("<f4"), 8: _cast("<f8")}
