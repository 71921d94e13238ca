"""Decode FLAC, MP3 and AIFF with libsndfile, and notice when it stops early.

It reads by descriptor: callbacks would need the interpreter lock. It trusts the header's count, but
joined files hold more. What follows is found by frame marks (RFC 9639; ISO 11172-3; ID3 and APE tags).
"""

from __future__ import annotations

import os
import re
from typing import Final

import numpy as np
import soundfile

from asr_server.audio.decoder import Block, CannotOpen
from asr_server.audio.library_messages import log_messages_of_libraries
from asr_server.core import Track

MAX_TAGS = 1 << 16  # bytes after the last frame of an MP3 that may be unknown tags
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


class SndfileDecoder:
    """Call libsndfile directly: soundfile seeks after every block and drops damaged blocks whole."""

    tracks_read: tuple[Track, ...] = ()

    def __init__(self, fd: int) -> None:
        log_messages_of_libraries()
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
        position = os.lseek(self._fd, 0, os.SEEK_CUR)
        num_left = os.fstat(self._fd).st_size - position
        if promised < NO_LENGTH:
            stopped = self._num_read < promised
        else:  # a FLAC that was written to a pipe: libsndfile says nothing of damage in it
            stopped = self._file.format == "FLAC" and num_left > 0
        self.truncated = damaged or stopped
        if self.truncated:
            self.has_more = damaged or num_left > 0
        elif self._file.format == "MP3":
            self.has_more = mp3_follows(self._fd, position)
        elif self._file.format == "FLAC":
            self.truncated = flac_of_another_format_follows(self._fd, position)
            self.has_more = not self.truncated and flac_follows(self._fd, position, self._num_read)


_MP3_RATES: Final = (44_100, 48_000, 32_000)
_MP3_KBITS: Final = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_KBITS_LOW: Final = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)  # MPEG 2 and 2.5
_MP3_SYNC: Final = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")


def mp3_follows(fd: int, position: int) -> bool:
    """Return whether layer 3 frames follow, perhaps behind tags."""
    data = os.pread(fd, MAX_TAGS, position)
    while size := _tag_size(data):
        position += size
        data = os.pread(fd, MAX_TAGS, position)
    if os.fstat(fd).st_size - position > MAX_TAGS:
        return True
    return any(_is_mp3_frame(data, match.start()) for match in _MP3_SYNC.finditer(data))


def _tag_size(data: bytes) -> int:
    if data.startswith(b"TAG"):
        return 128
    if data.startswith(b"APETAGEX") and len(data) >= 24:
        return 32 + int.from_bytes(data[12:16], "little")
    return id3_size(data)


def id3_size(data: bytes) -> int:
    if not data.startswith(b"ID3") or len(data) < 10:
        return 0
    size = sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
    return 10 + size + (10 if data[5] & 0x10 else 0)


def _is_mp3_frame(data: bytes, start: int) -> bool:
    size = _mp3_frame_size(data[start : start + 4])
    end = start + size
    return size > 0 and (data[end : end + 2] == data[start : start + 2] or end == len(data))


def _mp3_frame_size(header: bytes) -> int:
    if len(header) < 4:
        return 0
    version, kbits, rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if not 0 < kbits < 15 or rate == 3:
        return 0
    is_mpeg1 = version == 3
    sample_rate = _MP3_RATES[rate] // {3: 1, 2: 2, 0: 4}[version]
    bits_per_s = 1000 * (_MP3_KBITS if is_mpeg1 else _MP3_KBITS_LOW)[kbits - 1]
    return (144 if is_mpeg1 else 72) * bits_per_s // sample_rate + (header[2] >> 1 & 1)


_FLAC_BUFFER: Final = 1 << 15  # libFLAC reads ahead by less
_FLAC_SCANNED: Final = 1 << 20
_FLAC_SYNC: Final = re.compile(rb"\xff[\xf8\xf9]")
_FLAC_JOINED: Final = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")


def flac_of_another_format_follows(fd: int, position: int) -> bool:
    data = os.pread(fd, _FLAC_SCANNED, max(4, position - _FLAC_BUFFER))
    first = _flac_format(os.pread(fd, 21, 0))
    return any(_flac_format(data[m.start() : m.start() + 21]) != first for m in _FLAC_JOINED.finditer(data))


def _flac_format(head: bytes) -> int:
    return int.from_bytes(head[18:21], "big") >> 1


def flac_follows(fd: int, position: int, num_read: int) -> bool:
    """Return whether another FLAC, or a frame behind the `num_read` samples, is near `position`."""
    start = max(4, position - _FLAC_BUFFER)
    data = os.pread(fd, _FLAC_SCANNED, start)
    if _FLAC_JOINED.search(data):
        return True
    max_block = int.from_bytes(os.pread(fd, 2, 10), "big")  # the largest, which STREAMINFO states
    numbers = (
        _flac_end_sample(data[m.start() : m.start() + 16], max_block) for m in _FLAC_SYNC.finditer(data)
    )
    return any(number is not None and number > num_read for number in numbers)


def _flac_end_sample(header: bytes, max_block: int) -> int | None:
    if len(header) < 16 or header[2] >> 4 == 0 or header[2] & 15 == 15 or header[3] & 1:
        return None
    coded, size_at = _flac_number(header, 4)
    size_code, rate_code = header[2] >> 4, header[2] & 15
    rate_at = size_at + {6: 1, 7: 2}.get(size_code, 0)
    end = rate_at + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if coded is None or _crc8(header[:end]) != header[end]:
        return None
    first = coded if header[1] & 1 else coded * max_block
    return first + _flac_block_size(size_code, header[size_at:rate_at])


def _flac_block_size(code: int, stated: bytes) -> int:
    if stated:
        return int.from_bytes(stated, "big") + 1
    if code == 1:
        return 192
    return 576 << code - 2 if code < 6 else 256 << code - 8


def _flac_number(header: bytes, start: int) -> tuple[int | None, int]:
    first = header[start]
    num_more = max(0, 8 - (first ^ 0xFF).bit_length() - 1)
    if num_more > 6 or (first & 0xC0) == 0x80:
        return None, start
    more = header[start + 1 : start + 1 + num_more]
    if any(byte & 0xC0 != 0x80 for byte in more):
        return None, start
    value = first & (0x7F if num_more == 0 else 0xFF >> num_more + 2)
    for byte in more:
        value = value << 6 | byte & 0x3F
    return value, start + 1 + num_more


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ (0x107 if crc & 0x80 else 0)) & 0x1FF
    return crc
