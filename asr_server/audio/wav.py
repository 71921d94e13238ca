"""Read WAV as people have it: every span of samples, whatever the header counts.

RIFF and RF64, extensible headers and unset sizes (Multimedia Programming Interface and Data
Specifications 1.0; EBU Tech 3306). Sound behind too small a size, several data chunks and joined files
are read on.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.audio.decoder import Block, CannotOpen
from asr_server.audio.g711 import A_LAW, MU_LAW
from asr_server.core import Samples, Track

BLOCK_BYTES = 1 << 19
MAX_CHUNKS = 256  # before the samples, and behind them; a file may claim millions of empty ones
MIN_REST_BYTES = 4096  # less behind the samples is no sound that its size forgot
JUDGED_BYTES = 1 << 16
_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
# Left by streaming writers.
_UNKNOWN_SIZES = (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF - 36, 0x80000000)
_RIFFS: Final = (b"RIFF", b"RF64", b"BW64")
_METADATA: Final = (b"LIST", b"id3 ", b"ID3 ", b"fact", b"cue ", b"bext", b"iXML", b"JUNK", b"PAD ", b"smpl")
# Microsoft's order of the bits in a channel mask, by FFmpeg's names.
_SPEAKERS: Final = (
    *("FL", "FR", "FC", "LFE", "BL", "BR", "FLC", "FRC", "BC", "SL", "SR"),
    *("TC", "TFL", "TFC", "TFR", "TBL", "TBC", "TBR"),
)

Bytes = npt.NDArray[np.uint8]
Convert = Callable[[Bytes, Samples], None]  # from the file's samples to as many floats
Span = tuple[int, int]  # where samples begin and end in the file


class _Format(NamedTuple):
    tag: int
    num_channels: int
    sample_rate: int
    block_align: int
    bits: int
    channel_mask: int

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(_SPEAKERS) if self.channel_mask >> bit & 1)


def unsized_header(sample_rate: int, num_channels: int, sample_bytes: int) -> bytes:
    """Return a header without sizes: readers go on to the end."""
    frame_bytes = sample_bytes * num_channels
    rates = (sample_rate, sample_rate * frame_bytes & 0xFFFFFFFF, frame_bytes, 8 * sample_bytes)
    content = struct.pack("<4sIHHIIHH", b"fmt ", 16, _PCM, num_channels, *rates)
    return b"RIFF\xff\xff\xff\xffWAVE" + content + b"data\xff\xff\xff\xff"


class WavDecoder:
    has_exact_duration = True
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.truncated = self.has_more = False
        self._format, first = _read_header(fd, 0)
        self.sample_rate, self.num_channels = self._format.sample_rate, self._format.num_channels
        self.layout = self._format.layout
        self.is_float = self._format.tag == _FLOAT
        self._convert, self._sample_bytes = _converter(self._format)
        self._frame_bytes = self._sample_bytes * self.num_channels
        if not self.num_channels or self._format.block_align != self._frame_bytes:
            raise CannotOpen("block alignment and sample size disagree")
        self._file_end = os.fstat(fd).st_size
        self._data = np.empty(max(1, BLOCK_BYTES // self._frame_bytes) * self._frame_bytes, np.uint8)
        self._samples = np.empty(len(self._data) // self._sample_bytes, np.float32)
        spans = list(self._spans(first))
        self.duration_s: float | None = self._duration_s(spans)
        self._spans_left = iter(spans)
        self._offset = self._end = 0

    def read(self) -> Block:
        while True:
            if self._offset >= self._end:
                self._offset, self._end = next(self._spans_left, (self._end, self._end))
            data = self._data[: self._end - self._offset]
            num_bytes = os.preadv(self.fd, [data.data], self._offset)
            self._offset += num_bytes
            if not num_bytes and self._offset < self._end < _NO_END:
                self.truncated, self._end = True, self._offset
                continue
            samples = self._converted(data[:num_bytes])
            if len(samples) or not num_bytes:
                return samples.reshape(-1, self.num_channels)

    def close(self) -> None:
        pass

    def _converted(self, data: Bytes) -> Samples:
        whole = len(data) - len(data) % self._frame_bytes
        samples = self._samples[: whole // self._sample_bytes]
        self._convert(data[:whole], samples)
        return samples

    def _duration_s(self, spans: list[Span]) -> float:
        """Return the length; a size that is missing or too large means the end of the file."""
        sizes = (max(0, min(end, self._file_end) - start) for start, end in spans)
        return sum(size // self._frame_bytes for size in sizes) / max(1, self.sample_rate)

    def _spans(self, first: Span) -> Iterator[Span]:
        yield first
        start, end = first
        for _ in range(MAX_CHUNKS):
            if end >= self._file_end:
                return
            at = next((at for at in (end + (end - start) % 2, end) if self._is_chunk(at)), None)
            if at is None:
                yield from self._unclaimed(start, end)
                return
            name, size = struct.unpack("<4sI", os.pread(self.fd, 8, at))
            if name in _RIFFS:
                joined = self._joined(at)
                if joined is None:
                    return
                start, end = joined
                yield joined
            elif name == b"data":
                start, end = at + 8, _data_end(at + 8, size, None)
                yield start, end
            else:
                start, end = at + 8, at + 8 + size

    def _is_chunk(self, at: int) -> bool:
        head = os.pread(self.fd, 12, at)
        if len(head) < 8:
            return False
        name, size = struct.unpack("<4sI", head[:8])
        if name in _RIFFS:
            return head[8:] == b"WAVE"
        is_name = all(chr(byte).isalnum() or byte in b" _-" for byte in name) and name.isascii()
        return name == b"data" or name in _METADATA or (is_name and at + 8 + size <= self._file_end)

    def _joined(self, at: int) -> Span | None:
        try:
            wav_format, span = _read_header(self.fd, at)
        except CannotOpen:
            wav_format, span = None, None
        if wav_format is None or wav_format[:5] != self._format[:5]:
            self.truncated = True
            return None
        return span

    def _unclaimed(self, start: int, end: int) -> Iterator[Span]:
        """Yield what no chunk claims: sound of unset size, zeros or else."""
        end -= (end - start) % self._frame_bytes
        if self._file_end - end < MIN_REST_BYTES:
            return
        data = np.frombuffer(os.pread(self.fd, JUDGED_BYTES, end), np.uint8)
        if not data.any():
            return
        if _is_sound(self._converted(data)[:: self.num_channels]):
            yield end, self._file_end
        else:
            self.truncated = True


def _is_sound(samples: Samples) -> bool:
    """Return whether samples are not random bytes, which are loud and uncorrelated."""
    if not np.isfinite(samples).all():
        return False
    power = float(np.mean(np.square(samples, dtype=np.float64)))
    likeness = float(np.mean(samples[1:].astype(np.float64) * samples[:-1]))
    return power < _RANDOM_POWER or likeness > 0.2 * power


_RANDOM_POWER: Final = 0.15  # a third is that of random integers
_NO_END = 1 << 62


def _read_header(fd: int, start: int) -> tuple[_Format, Span]:
    magic = os.pread(fd, 12, start)
    if magic[:4] not in _RIFFS or magic[8:12] != b"WAVE":
        raise CannotOpen("not a RIFF/WAVE file")
    wav_format, long_size = None, None
    for name, size, offset in itertools.islice(_chunks(fd, start + 12), MAX_CHUNKS):
        if name == b"ds64":
            long_size = struct.unpack("<8xQ", os.pread(fd, 16, offset).ljust(16, b"\0"))[0]
        elif name == b"fmt ":
            wav_format = _parse_format(os.pread(fd, min(size, 40), offset))
        elif name == b"data" and wav_format:
            return wav_format, (offset, _data_end(offset, size, long_size))
    raise CannotOpen("no samples in it")


def _chunks(fd: int, offset: int) -> Iterator[tuple[bytes, int, int]]:
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
    mask = 0
    if tag == _EXTENSIBLE and len(content) >= 26:
        mask, tag = struct.unpack_from("<IH", content, 20)
    return _Format(tag, num_channels, sample_rate, block_align, bits, mask)


def _converter(wav_format: _Format) -> tuple[Convert, int]:
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
    """Shift three bytes to the top of 32 bits, to keep the sign."""
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
