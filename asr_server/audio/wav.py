"""Read WAV as people have it: every span of samples, whatever the header counts.

RIFF and RF64, extensible headers and unset sizes (Multimedia Programming Interface and Data
Specifications 1.0; EBU Tech 3306). A size that is wrong means the end of the file; several data chunks and
joined files are read on. libsndfile converts the samples.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import soundfile

from asr_server.audio.decoder import Block, CannotOpen
from asr_server.audio.sndfile import BLOCK_FRAMES, read_frames
from asr_server.core import Track

MAX_CHUNKS = 256  # before the samples, and behind them; a file may claim millions of empty ones
MIN_REST_BYTES = 4096  # less behind the samples is no sound that its size forgot
JUDGED_BYTES = 1 << 16
_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
# libsndfile's names, by format and bytes a sample.
_SUBTYPES: Final = {
    (_PCM, 1): "PCM_U8",
    (_PCM, 2): "PCM_16",
    (_PCM, 3): "PCM_24",
    (_PCM, 4): "PCM_32",
    (_FLOAT, 4): "FLOAT",
    (_FLOAT, 8): "DOUBLE",
    (_ALAW, 1): "ALAW",
    (_MULAW, 1): "ULAW",
}
# Left by streaming writers.
_UNKNOWN_SIZES = (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF - 36, 0x80000000)
_NO_END = 1 << 62
_RIFFS: Final = (b"RIFF", b"RF64", b"BW64")
# Microsoft's order of the bits in a channel mask, by FFmpeg's names.
_SPEAKERS: Final = (
    *("FL", "FR", "FC", "LFE", "BL", "BR", "FLC", "FRC", "BC", "SL", "SR"),
    *("TC", "TFL", "TFC", "TFR", "TBL", "TBC", "TBR"),
)

Span = tuple[int, int]  # where samples begin and end in the file


class _Format(NamedTuple):
    tag: int
    num_channels: int
    sample_rate: int
    frame_bytes: int
    bits: int
    channel_mask: int

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(_SPEAKERS) if self.channel_mask >> bit & 1)

    @property
    def gain(self) -> np.float32:
        """Undo that `arecord -f S24_LE` writes 24 bits to the low end of four bytes."""
        is_loose = self.tag == _PCM and self.bits in (20, 24) and self.frame_bytes == 4 * self.num_channels
        return np.float32(2 ** (32 - self.bits) if is_loose else 1)

    @property
    def subtype(self) -> str:
        sample_bytes = 4 if self.gain > 1 else (self.bits + 7) // 8
        subtype = _SUBTYPES.get((self.tag, sample_bytes))
        if subtype is None or not 0 < self.frame_bytes == sample_bytes * self.num_channels:
            raise CannotOpen(f"codec {self.tag} with {self.bits} bits and {self.frame_bytes} bytes a frame")
        return subtype


def unsized_header(sample_rate: int, num_channels: int, sample_bytes: int) -> bytes:
    """Return a header without sizes: readers go on to the end."""
    frame_bytes = sample_bytes * num_channels
    rates = (sample_rate, sample_rate * frame_bytes & 0xFFFFFFFF, frame_bytes, 8 * sample_bytes)
    content = struct.pack("<4sIHHIIHH", b"fmt ", 16, _PCM, num_channels, *rates)
    return b"RIFF\xff\xff\xff\xffWAVE" + content + b"data\xff\xff\xff\xff"


class WavDecoder:
    has_exact_duration = True
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int, start: int = 0) -> None:
        self.fd = fd
        self.truncated = self.has_more = False
        self._format, first = _read_header(fd, start)
        self.sample_rate, self.num_channels = self._format.sample_rate, self._format.num_channels
        self.layout = self._format.layout
        self.is_float = self._format.tag == _FLOAT
        self._gain = self._format.gain
        self._file_end = os.fstat(fd).st_size
        lengths = [(start, self._num_frames(start, end)) for start, end in self._spans(first)]
        self.duration_s: float | None = sum(num for _, num in lengths) / max(1, self.sample_rate)
        self._spans_left = iter(lengths)
        self._num_left = 0  # frames of the span
        self._block: Block = np.empty((BLOCK_FRAMES, self.num_channels), np.float32)
        self._file = self._open()

    def read(self) -> Block:
        while not self._num_left:
            start, self._num_left = next(self._spans_left, (-1, 0))
            if start < 0:
                return self._block[:0]
            os.lseek(self.fd, start, os.SEEK_SET)
        block = read_frames(self._file, self._block[: self._num_left])
        self._num_left = self._num_left - len(block) if len(block) else 0
        return np.multiply(block, self._gain, out=block) if self._gain != 1 else block

    def close(self) -> None:
        self._file.close()

    def _open(self) -> soundfile.SoundFile:
        """Open the file as samples alone: libsndfile then reads on from where the descriptor is put."""
        os.lseek(self.fd, 0, os.SEEK_SET)
        layout = (self.sample_rate, self.num_channels, self._format.subtype, "LITTLE", "RAW")
        try:
            return soundfile.SoundFile(self.fd, "r", *layout, closefd=False)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise CannotOpen(str(error)) from error

    def _num_frames(self, start: int, end: int) -> int:
        self.truncated = self.truncated or self._file_end < end < _NO_END
        return max(0, min(end, self._file_end) - start) // self._format.frame_bytes

    def _spans(self, first: Span) -> Iterator[Span]:
        yield first
        start, end = first
        for _ in range(MAX_CHUNKS):
            if end >= self._file_end:
                return
            at = next((at for at in (end + (end - start) % 2, end) if self._is_chunk(at)), None)
            if at is None:
                end -= (end - start) % self._format.frame_bytes
                if self._file_end - end >= MIN_REST_BYTES and any(os.pread(self.fd, JUDGED_BYTES, end)):
                    yield end, self._file_end
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
        return name == b"data" or (is_name and at + 8 + size <= self._file_end)

    def _joined(self, at: int) -> Span | None:
        try:
            wav_format, span = _read_header(self.fd, at)
        except CannotOpen:
            wav_format, span = None, None
        if wav_format is None or wav_format[:5] != self._format[:5]:
            self.truncated = True
            return None
        return span


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
    tag, num_channels, sample_rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", content)
    mask = 0
    if tag == _EXTENSIBLE and len(content) >= 26:
        mask, tag = struct.unpack_from("<IH", content, 20)
    return _Format(tag, num_channels, sample_rate, frame_bytes, bits, mask)
