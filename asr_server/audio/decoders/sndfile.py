"""FLAC, MP3 and AIFF through libsndfile, by file descriptor: no callback ever takes the lock."""

from __future__ import annotations

import os

import numpy as np
import soundfile

from asr_server.audio.decoders.base import Block, CannotOpen

BLOCK_SAMPLES = 1 << 17  # over all channels: 1.4 s of 48 kHz stereo


class SndfileDecoder:
    def __init__(self, fd: int) -> None:
        """Raises CannotOpen where libsndfile does not."""
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            self._file = soundfile.SoundFile(fd, closefd=False)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise CannotOpen(str(error)) from error
        self.sample_rate, self.num_channels = self._file.samplerate, self._file.channels
        self.truncated = False
        self._num_read = 0
        self._block_frames = max(1, BLOCK_SAMPLES // self.num_channels)

    def read(self) -> Block:
        block: Block = np.empty((self._block_frames, self.num_channels), np.float32)
        try:
            block = self._file.read(out=block)
        except (soundfile.LibsndfileError, RuntimeError):
            self.truncated = True  # damaged from here on; what came before stands
            return block[:0]
        self._num_read += len(block)
        if not len(block) and self._num_read < self._file.frames < 1 << 62:
            self.truncated = True
        return block

    def close(self) -> None:
        self._file.close()
