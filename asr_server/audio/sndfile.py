"""Decode FLAC, MP3 and AIFF with libsndfile, and notice when it stops early.

It reads by descriptor: callbacks would need the interpreter lock. It trusts the header's count, but
joined files hold more. What follows is found by frame marks (RFC 9639; ID3 and APE tags).
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from functools import cache
from typing import Final

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


def read_frames(file: soundfile.SoundFile, block: Block) -> Block:
    """Fill the start of a block. soundfile itself seeks after every block, and drops damaged ones whole."""
    pointer = soundfile._ffi.cast("float *", block.ctypes.data)
    return block[: int(soundfile._snd.sf_readf_float(file._file, pointer, len(block)))]


class SndfileDecoder:
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int) -> None:
        silence_libraries()
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            self._file = soundfile.SoundFile(fd, closefd=False)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise CannotOpen(str(error)) from error
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
            self.has_more = mp3_follows(self._fd, position)
        elif self._file.format == "FLAC":
            self.has_more = flac_follows(self._fd, position, self._num_read)


_MP3_HEAD: Final = 200  # bytes of the first frame
_MP3_COUNT: Final = re.compile(rb"Xing|Info|VBRI")  # without it, libsndfile guesses by the file's size


def mp3_follows(fd: int, position: int) -> bool:
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
_FLAC_SCANNED: Final = 1 << 20
_FLAC_FRAME: Final = re.compile(rb"\xff[\xf8\xf9][\x10-\xff]..", re.DOTALL)
_FLAC_JOINED: Final = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")


def flac_follows(fd: int, position: int, num_read: int) -> bool:
    """Return whether another FLAC, or a frame behind the `num_read` samples, is near `position`."""
    data = os.pread(fd, _FLAC_SCANNED, max(4, position - _FLAC_BUFFER))
    if _FLAC_JOINED.search(data):
        return True
    max_block = int.from_bytes(os.pread(fd, 2, 10), "big")  # the largest, which STREAMINFO states
    headers = (data[match.start() : match.start() + 16] for match in _FLAC_FRAME.finditer(data))
    return any(_flac_end(header, max_block) > num_read for header in headers)


def _flac_end(header: bytes, max_block: int) -> int:
    """Return the place behind a frame's last sample, -1 if the checksum says that it is no frame."""
    num_bytes = max(1, 8 - (header[4] ^ 0xFF).bit_length())  # of a number in UTF-8's way
    size_code, rate_code = header[2] >> 4, header[2] & 15
    size_end = 4 + num_bytes + {6: 1, 7: 2}.get(size_code, 0)
    end = size_end + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if _crc8(header[:end]) != header[end : end + 1]:
        return -1
    number = header[4] & (0xFF >> num_bytes + (num_bytes > 1))
    for byte in header[5 : 4 + num_bytes]:
        number = number << 6 | byte & 0x3F
    stated = int.from_bytes(header[4 + num_bytes : size_end], "big") + 1
    sizes = (0, 192, 576, 1152, 2304, 4608, stated, stated, *(256 << shift for shift in range(8)))
    return (number if header[1] & 1 else number * max_block) + sizes[size_code]


def _crc8(data: bytes) -> bytes:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ (0x107 if crc & 0x80 else 0)) & 0x1FF
    return bytes([crc])


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
