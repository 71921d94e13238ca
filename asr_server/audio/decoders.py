"""Decodes WAV, FLAC, MP3 and AIFF in blocks (arrays of samples) of the file's own rate and layout.

Runs in the preprocess threads of the API process, for `recording.py` and `stream.py`, and must not hold the
interpreter lock for long. Imports no FFmpeg.

A file is known by its first bytes: names and content types are not trusted. libsndfile reads by file
descriptor: a callback into Python would need the interpreter lock. WAV is read here: RIFF and RF64,
extensible headers, streams whose size was never filled in (Multimedia Programming Interface and Data
Specifications 1.0; EBU Tech 3306), and G.711, which realtime sessions use too (ITU-T G.711: a code of either
law is a sign, three bits of exponent and four of mantissa). All else goes to `ffmpeg_client.py`, which asks a
process that has FFmpeg.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import soundfile

from asr_server.audio.library_messages import log_messages_of_libraries
from asr_server.audio.limits import invalid_audio
from asr_server.core import Samples

Block = npt.NDArray[np.float32]  # [frames, channels] at the file's own rate, full scale is 1.0


class Decoder(Protocol):
    """One open file. Not thread-safe."""

    sample_rate: int
    num_channels: int
    duration_s: float | None  # what the file's header says, which need not be so; None: nothing
    is_float: bool  # the file's own numbers are floats: there may be NaN and infinity among them
    truncated: bool  # known at the end: the file promised more than it held, or was damaged on the way
    has_more: bool  # known at the end: this decoder stopped where another one may be able to go on

    def read(self) -> Block:
        """The next block, of a few seconds at most; one without frames is the end. The next call may use
        its memory again: fresh memory for each block costs more than converting the samples does.

        Raises:
            InvalidAudio: nothing at all could be read.
        """
        ...

    def close(self) -> None: ...


class CannotOpen(Exception):
    """This decoder does not read this file; another one may."""


MAX_TAGS = 1 << 16  # bytes after the last frame of an MP3 that may be its title and the like
NO_LENGTH = 1 << 60
BLOCK_FRAMES = 1 << 16  # 1.4 s at 48 kHz


class SndfileDecoder:
    """Calls libsndfile's read itself. soundfile's own method seeks after every block, which costs a tenth of
    the time, and drops a whole block when something in it is damaged.
    """

    def __init__(self, fd: int) -> None:
        """Raises CannotOpen where libsndfile does not."""
        log_messages_of_libraries()
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            self._file = soundfile.SoundFile(fd, closefd=False)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise CannotOpen(str(error)) from error
        self.sample_rate, self.num_channels = self._file.samplerate, self._file.channels
        num_frames = self._file.frames  # 2^63 - 1 where the file does not say
        self.duration_s: float | None = num_frames / self.sample_rate if num_frames < NO_LENGTH else None
        self.is_float = self._file.subtype in ("FLOAT", "DOUBLE")
        self.truncated = self.has_more = False
        self._fd = fd
        self._num_read = 0
        self._block: Block = np.empty((BLOCK_FRAMES, self.num_channels), np.float32)

    def read(self) -> Block:
        pointer = soundfile._ffi.cast("float *", self._block.ctypes.data)
        num_frames = int(soundfile._snd.sf_readf_float(self._file._file, pointer, BLOCK_FRAMES))
        self._num_read += num_frames
        if num_frames < BLOCK_FRAMES:
            self._judge_the_end()
        return self._block[:num_frames]

    def close(self) -> None:
        self._file.close()

    def _judge_the_end(self) -> None:
        damaged = bool(soundfile._snd.sf_error(self._file._file))
        promised = self._file.frames
        num_left = os.fstat(self._fd).st_size - os.lseek(self._fd, 0, os.SEEK_CUR)
        if promised < NO_LENGTH:
            stopped = self._num_read < promised
        else:  # a FLAC that was written to a pipe: libsndfile says nothing of damage in it
            stopped = self._file.format == "FLAC" and num_left > 0
        self.truncated = damaged or stopped
        if self.truncated:
            self.has_more = damaged or num_left > 0
        else:
            self.has_more = self._file.format == "MP3" and num_left > MAX_TAGS


Family = Literal["wav", "sndfile", "ffmpeg"]


def sniff(fd: int) -> Family:
    """The family whose decoder is tried first.

    libsndfile reads Ogg Vorbis too, but 1.7 times slower than FFmpeg, and only the first of chained streams.
    """
    head = os.pread(fd, 64, 0)
    if not head:
        raise invalid_audio("The file is empty.")
    if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"fLaC" or (head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC")):
        return "sndfile"
    if _is_mp3(fd, head):
        return "sndfile"
    return "ffmpeg"


def _is_mp3(fd: int, head: bytes) -> bool:
    """MPEG audio of layer 3, after an ID3 tag of any size (cover art)."""
    if head[:3] == b"ID3" and len(head) >= 10:
        size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
        head = os.pread(fd, 4, 10 + size)
    return len(head) >= 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2


def open_native(fd: int) -> Decoder | None:
    """A decoder that runs in a thread of this process; None: FFmpeg's libraries have to try."""
    family = sniff(fd)
    try:
        if family == "wav":
            return WavDecoder(fd)
        if family == "sndfile":
            return SndfileDecoder(fd)
    except CannotOpen:
        pass
    return None


Table = npt.NDArray[np.float32]  # [256], by code

_CODES: Final = np.arange(256)
_FULL_SCALE: Final = 2.0**15


def _mu_law() -> Table:
    """All bits are inverted, and the magnitude has a bias of 132."""
    codes = ~_CODES & 0xFF
    exponent, mantissa = (codes >> 4) & 7, codes & 15
    magnitude = (((mantissa << 3) + 132) << exponent) - 132
    return (np.where(codes & 0x80, -magnitude, magnitude) / _FULL_SCALE).astype(np.float32)


def _a_law() -> Table:
    """Every other bit is inverted, and the lowest exponent is linear."""
    codes = _CODES ^ 0x55
    exponent, mantissa = (codes >> 4) & 7, codes & 15
    magnitude = np.where(
        exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 264) << np.maximum(exponent - 1, 0)
    )
    return (np.where(codes & 0x80, magnitude, -magnitude) / _FULL_SCALE).astype(np.float32)


MU_LAW: Final = _mu_law()
A_LAW: Final = _a_law()


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
