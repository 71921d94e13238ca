"""Decodes FLAC, MP3 and AIFF through libsndfile.

It reads by file descriptor: a callback into Python would need the interpreter lock.
"""

from __future__ import annotations

import os

import numpy as np
import soundfile

from asr_server.audio.decoders.base import Block, CannotOpen

MAX_TAGS = 1 << 16  # bytes after the last frame of an MP3 that may be its title and the like
NO_LENGTH = 1 << 60
BLOCK_FRAMES = 1 << 16  # 1.4 s at 48 kHz


class SndfileDecoder:
    """Calls libsndfile's read itself. soundfile's own method seeks after every block, which costs a tenth of
    the time, and drops a whole block when something in it is damaged.
    """

    def __init__(self, fd: int) -> None:
        """Raises CannotOpen where libsndfile does not."""
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
