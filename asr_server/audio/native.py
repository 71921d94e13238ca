"""Decode WAV, FLAC, MP3 and AIFF in this process, by libsndfile.

It reads by descriptor: callbacks would need the interpreter lock. Of WAV it converts the samples alone:
people have files with extensible headers and unset sizes (Multimedia Programming Interface and Data
Specifications 1.0; EBU Tech 3306). Of the others it trusts the header's count, but joined files hold more.
"""

import ctypes
import io
import itertools
import os
import platform
import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import soundfile

from asr_server.audio.decoder import Block, CannotOpen, id3_size
from asr_server.core import Track

MAX_TAGS = 100  # one behind another
MAX_ZEROS = 1 << 16  # with which some writers end an MP3
NO_LENGTH = 1 << 60
BLOCK_FRAMES = 1 << 16  # 1.4 s at 48 kHz

# The order that the FLAC format prescribes, by the number of channels.
FLAC_LAYOUTS: Final = {
    3: ("FL", "FR", "FC"),
    4: ("FL", "FR", "BL", "BR"),
    5: ("FL", "FR", "FC", "BL", "BR"),
    6: ("FL", "FR", "FC", "LFE", "BL", "BR"),
    7: ("FL", "FR", "FC", "LFE", "BC", "SL", "SR"),
    8: ("FL", "FR", "FC", "LFE", "BL", "BR", "SL", "SR"),
}


def _opened(fd: int, *layout: str | int) -> soundfile.SoundFile:
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        return soundfile.SoundFile(fd, *layout, closefd=False)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise CannotOpen(str(error)) from error


def read_frames(file: soundfile.SoundFile, block: Block) -> Block:
    """Fill the start of a block. soundfile itself seeks after every block, and drops damaged ones whole."""
    pointer = soundfile._ffi.cast("float *", block.ctypes.data)
    return block[: int(soundfile._snd.sf_readf_float(file._file, pointer, len(block)))]


class SndfileDecoder:
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int) -> None:
        silence_libraries()
        self._file = _opened(fd)
        self.sample_rate, self.num_channels = self._file.samplerate, self._file.channels
        num_frames = self._file.frames  # 2^63 - 1 where the file does not say
        self.duration_s: float | None = num_frames / self.sample_rate if num_frames < NO_LENGTH else None
        self.has_exact_duration = self._file.format != "MP3"  # of which some are estimates
        self.layout: tuple[str, ...] = (
            FLAC_LAYOUTS.get(self.num_channels, ()) if self._file.format == "FLAC" else ()
        )
        self.is_float = self._file.subtype in ("FLOAT", "DOUBLE")
        self.truncated = self.has_more = False
        self._fd = fd
        self._num_read = 0
        head = os.pread(fd, _MP3_HEAD, id3_size(os.pread(fd, 10, 0)))
        self._is_counted = self._file.format != "MP3" or _MP3_COUNT.search(head) is not None
        self._block: Block = np.empty((BLOCK_FRAMES, self.num_channels), np.float32)

    def read(self) -> Block:
        block = read_frames(self._file, self._block)
        self._num_read += len(block)
        if len(block) < BLOCK_FRAMES:
            self._judge_the_end()
        return block

    def close(self) -> None:
        self._file.close()

    def _judge_the_end(self) -> None:
        damaged = bool(soundfile._snd.sf_error(self._file._file))
        promised = self._file.frames
        position = os.lseek(self._fd, 0, os.SEEK_CUR)
        num_left = os.fstat(self._fd).st_size - position
        if promised < NO_LENGTH:
            stopped = self._is_counted and self._num_read < promised
        else:  # a FLAC that was written to a pipe: libsndfile says nothing of damage in it
            stopped = self._file.format == "FLAC" and num_left > 0
        self.truncated = damaged or stopped
        if self.truncated:
            self.has_more = damaged or num_left > 0
        elif self._file.format == "MP3":
            self.has_more = sound_follows(self._fd, position)
        elif self._file.format == "FLAC":
            self.has_more = flac_follows(self._fd, position)


_MP3_HEAD: Final = 200  # bytes of the first frame
_MP3_COUNT: Final = re.compile(rb"Xing|Info|VBRI")  # without it, libsndfile guesses by the file's size


def sound_follows(fd: int, position: int) -> bool:
    """Return whether anything but tags follows."""
    for _ in range(MAX_TAGS):
        size = _tag_size(os.pread(fd, 32, position))
        if not size:
            break
        position += size
    data = os.pread(fd, MAX_ZEROS, position)
    return len(data) > 4 and any(data)


def _tag_size(data: bytes) -> int:
    if data.startswith(b"TAG"):
        return 128
    if data.startswith(b"APETAGEX") and len(data) >= 24:
        return 32 + int.from_bytes(data[12:16], "little")
    return id3_size(data)


_FLAC_BUFFER: Final = 1 << 15  # libFLAC reads ahead by less
_FLAC_JOINED: Final = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")


def flac_follows(fd: int, position: int) -> bool:
    """Return whether another FLAC begins before `position`, or anything but tags follows it."""
    read_ahead = os.pread(fd, _FLAC_BUFFER, max(4, position - _FLAC_BUFFER))
    return _FLAC_JOINED.search(read_ahead) is not None or sound_follows(fd, position)


@cache
def silence_libraries() -> None:
    """Discard what C code prints to `stderr`; Python's and descriptor 2 stay as they are.

    libmpg123 prints each damage without its name, and the decoder reports damage itself. Needs glibc, where
    `stderr` can be set (its manual, "Standard Streams").
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        ctypes.c_void_p.in_dll(libc, "stderr").value = libc.fopen(os.devnull.encode(), b"w")


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
_RIFFS: Final = (b"RIFF", b"RF64", b"BW64")
_SOUND: Final = (b"data", *_RIFFS)
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


def pcm_frames(data: bytes, sample_rate: int, num_channels: int, sample_bytes: int) -> Block:
    """Return whole frames of little-endian PCM as [frames, channels]."""
    layout = (sample_rate, num_channels, _SUBTYPES[_PCM, sample_bytes], "LITTLE", "RAW")
    with soundfile.SoundFile(io.BytesIO(data), "r", *layout) as file:
        frames: Block = file.read(dtype="float32", always_2d=True)
    return frames


class WavDecoder:
    has_exact_duration = True
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int, start: int = 0) -> None:
        self.fd = fd
        self.truncated = self.has_more = False
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
        # As samples alone: libsndfile then reads on from where the descriptor is put.
        layout = (self.sample_rate, self.num_channels, self._format.subtype, "LITTLE", "RAW")
        self._file = _opened(fd, "r", *layout)
        os.lseek(fd, samples[0], os.SEEK_SET)

    def read(self) -> Block:
        block = read_frames(self._file, self._block[: self._num_left])
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
        head = os.pread(self.fd, 8, at)
        if len(head) < 8:
            return b""
        name: bytes
        name, size = struct.unpack("<4sI", head)
        is_name = all(chr(byte).isalnum() or byte in b" _-" for byte in name) and name.isascii()
        return name if name in _SOUND or (is_name and at + 8 + size <= self._file_end) else b""


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
