"""WAV by its own rules: RIFF and RF64, extensible headers, streams whose size was never filled in.

Sources: Multimedia Programming Interface and Data Specifications 1.0 (RIFF), EBU Tech 3306 (RF64),
ITU-T G.711 (A-law and mu-law).
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

BLOCK_BYTES = 1 << 18
MAX_CHUNKS = 256  # before the samples; a file may claim millions of empty ones
_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_UNKNOWN_SIZES = (
    0,
    0xFFFFFFFF,
    0x7FFFFFFF,
    0x7FFFF000,
    0xFFFFFFFF - 36,
    0x80000000,
)  # left by streaming writers

Convert = Callable[[bytes], npt.NDArray[np.float32]]


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
        self._convert, sample_bytes = _converter(wav_format)
        self._frame_bytes = sample_bytes * self.num_channels
        if not self.num_channels or wav_format.block_align != self._frame_bytes:
            raise CannotOpen("block alignment and sample size disagree")
        self._block_bytes = max(1, BLOCK_BYTES // self._frame_bytes) * self._frame_bytes

    def read(self) -> Block:
        data = os.pread(self.fd, min(self._block_bytes, self._end - self._offset), self._offset)
        self._offset += len(data)
        if not data and self._offset < self._end < _NO_END:
            self.truncated = True
        whole = len(data) - len(data) % self._frame_bytes  # a last frame cut in the middle is dropped
        return self._convert(data[:whole] if whole < len(data) else data).reshape(-1, self.num_channels)

    def close(self) -> None:
        pass


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
        table = _ALAW_TABLE if wav_format.tag == _ALAW else _MULAW_TABLE
        return lambda data: table[np.frombuffer(data, np.uint8)], 1
    converters = _FLOAT_CONVERTERS if wav_format.tag == _FLOAT else _PCM_CONVERTERS
    if wav_format.tag not in (_PCM, _FLOAT) or sample_bytes not in converters:
        raise CannotOpen(f"codec {wav_format.tag} with {wav_format.bits} bits")
    return converters[sample_bytes], sample_bytes


def _scaled(dtype: str, full_scale: float) -> Convert:
    scale = np.float32(1 / full_scale)

    def convert(data: bytes) -> npt.NDArray[np.float32]:
        samples = np.empty(len(data) // np.dtype(dtype).itemsize, np.float32)
        np.multiply(np.frombuffer(data, dtype), scale, out=samples, casting="same_kind")
        return samples

    return convert


def _from_8_bit(data: bytes) -> npt.NDArray[np.float32]:
    return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) * np.float32(1 / 128)


def _from_24_bit(data: bytes) -> npt.NDArray[np.float32]:
    """Three bytes into the upper part of 32 bits, so that the sign comes along."""
    wide = np.zeros((len(data) // 3, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return wide.view("<i4")[:, 0].astype(np.float32) * np.float32(2.0**-31)


_PCM_CONVERTERS: dict[int, Convert] = {
    1: _from_8_bit,
    2: _scaled("<i2", 2.0**15),
    3: _from_24_bit,
    4: _scaled("<i4", 2.0**31),
}
_FLOAT_CONVERTERS: dict[int, Convert] = {
    4: lambda data: np.frombuffer(data, "<f4").astype(np.float32, copy=False),
    8: lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}


def _alaw_table() -> npt.NDArray[np.float32]:
    code = np.arange(256) ^ 0x55
    exponent, mantissa = (code >> 4) & 7, code & 15
    magnitude = np.where(
        exponent == 0, mantissa * 16 + 8, (mantissa * 16 + 264) << np.maximum(exponent - 1, 0)
    )
    return (np.where(code & 0x80, magnitude, -magnitude) / 2.0**15).astype(np.float32)


def _mulaw_table() -> npt.NDArray[np.float32]:
    code = ~np.arange(256) & 0xFF
    magnitude = ((((code & 15) << 3) + 132) << ((code >> 4) & 7)) - 132
    return (np.where(code & 0x80, -magnitude, magnitude) / 2.0**15).astype(np.float32)


_ALAW_TABLE, _MULAW_TABLE = _alaw_table(), _mulaw_table()
