"""Decode WAV in this process: no process of FFmpeg's is needed for what most programs send.

libsndfile converts the samples alone: people have files with extensible headers and unset sizes (Multimedia
Programming Interface and Data Specifications 1.0; EBU Tech 3306). It reads by descriptor: callbacks would
need the interpreter lock.
"""

import io
import itertools
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import soundfile

from asr_server.audio.decoder import Block, CannotOpen
from asr_server.core import Track

BLOCK_FRAMES = 1 << 16  # 1.4 s at 48 kHz
MAX_CHUNKS = 256  # before the samples; a file may claim millions of empty ones
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
_RIFFS: Final = (b"RIFF", b"RF64", b"BW64", b"RIFX")  # RIFX: big-endian
_SOUND: Final = (b"data", *_RIFFS)
# Microsoft's order of the bits in a channel mask, by FFmpeg's names.
_SPEAKERS: Final = (
    *("FL", "FR", "FC", "LFE", "BL", "BR", "FLC", "FRC", "BC", "SL", "SR"),
    *("TC", "TFL", "TFC", "TFR", "TBL", "TBC", "TBR"),
)

Span = tuple[int, int]  # where samples begin and end in the file


class _Format(NamedTuple):
    order: str  # of bytes, as `struct` has it
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


def pcm_frames(data: bytes, sample_rate: int, num_channels: int, sample_bytes: int) -> Block:
    """Return whole frames of little-endian PCM as [frames, channels]."""
    layout = (sample_rate, num_channels, _SUBTYPES[_PCM, sample_bytes], "LITTLE", "RAW")
    with soundfile.SoundFile(io.BytesIO(data), "r", *layout) as file:
        frames: Block = file.read(dtype="float32", always_2d=True)
    return frames


class WavDecoder:
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int, start: int = 0) -> None:
        self.fd = fd
        self.truncated = False
        self._format, samples = _read_header(fd, start)
        self.sample_rate, self.num_channels = self._format.sample_rate, self._format.num_channels
        self.layout = self._format.layout
        self.is_float = self._format.tag == _FLOAT
        self._gain = self._format.gain
        self._file_end = os.fstat(fd).st_size
        end = self._end(*samples)
        self.truncated = self.truncated or self._file_end < end < _NO_END
        self._num_left = max(0, min(end, self._file_end) - samples[0]) // self._format.frame_bytes
        self.duration_s: float | None = self._num_left / max(1, self.sample_rate)
        self._block: Block = np.empty((BLOCK_FRAMES, self.num_channels), np.float32)
        endian = "BIG" if self._format.order == ">" else "LITTLE"
        layout = (self.sample_rate, self.num_channels, self._format.subtype, endian, "RAW")
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            self._file = soundfile.SoundFile(fd, "r", *layout, closefd=False)
        except soundfile.LibsndfileError as error:
            raise CannotOpen(str(error)) from error
        os.lseek(fd, samples[0], os.SEEK_SET)  # libsndfile reads on from where the descriptor is put

    def read(self) -> Block:
        wanted = self._block[: self._num_left]
        # soundfile's own method seeks after every block, as if samples began with the file.
        pointer = soundfile._ffi.cast("float *", wanted.ctypes.data)
        block = wanted[: int(soundfile._snd.sf_readf_float(self._file._file, pointer, len(wanted)))]
        self._num_left -= len(block)
        return np.multiply(block, self._gain, out=block) if self._gain != 1 else block

    def close(self) -> None:
        self._file.close()

    def _end(self, start: int, counted_end: int) -> int:
        """Return where the samples end: where the header says, or with the file if it forgot some.

        Of joined files, and of several data chunks, only the first is read.
        """
        padded_end = counted_end + (counted_end - start) % 2
        if name := self._chunk_at(padded_end) or self._chunk_at(counted_end):
            self.truncated = name in _SOUND
            return counted_end
        has_more = any(os.pread(self.fd, JUDGED_BYTES, counted_end))
        is_long = self._file_end - counted_end >= MIN_REST_BYTES
        return self._file_end if has_more and is_long else counted_end

    def _chunk_at(self, at: int) -> bytes:
        """Return the name of the chunk that begins there; empty if none does."""
        name, size, start = next(_chunks(self.fd, at, self._format.order), (b"", 0, at))
        is_name = all(chr(byte).isalnum() or byte in b" _-" for byte in name) and name.isascii()
        return name if name in _SOUND or (is_name and start + size <= self._file_end) else b""


def _read_header(fd: int, start: int) -> tuple[_Format, Span]:
    magic = os.pread(fd, 12, start)
    if magic[:4] not in _RIFFS or magic[8:12] != b"WAVE":
        raise CannotOpen("not a RIFF/WAVE file")
    order = ">" if magic[:4] == b"RIFX" else "<"
    wav_format, long_size = None, None
    for name, size, offset in itertools.islice(_chunks(fd, start + 12, order), MAX_CHUNKS):
        if name == b"ds64":
            long_size = struct.unpack("<8xQ", os.pread(fd, 16, offset).ljust(16, b"\0"))[0]
        elif name == b"fmt ":
            wav_format = _parse_format(os.pread(fd, min(size, 40), offset), order)
        elif name == b"data" and wav_format:
            return wav_format, (offset, _data_end(offset, size, long_size))
    raise CannotOpen("no samples in it")


def _chunks(fd: int, offset: int, order: str) -> Iterator[tuple[bytes, int, int]]:
    while len(head := os.pread(fd, 8, offset)) == 8:
        name, size = struct.unpack(f"{order}4sI", head)
        yield name, size, offset + 8
        offset += 8 + size + size % 2


def _data_end(offset: int, size: int, long_size: int | None) -> int:
    if size == 0xFFFFFFFF and long_size:
        return offset + long_size
    return _NO_END if size in _UNKNOWN_SIZES else offset + size


def _parse_format(content: bytes, order: str) -> _Format:
    if len(content) < 16:
        raise CannotOpen("its format chunk is too short")
    tag, num_channels, sample_rate, _, frame_bytes, bits = struct.unpack_from(f"{order}HHIIHH", content)
    mask = 0
    if tag == _EXTENSIBLE and len(content) >= 26:
        mask, tag = struct.unpack_from(f"{order}IH", content, 20)
    return _Format(order, tag, num_channels, sample_rate, frame_bytes, bits, mask)
