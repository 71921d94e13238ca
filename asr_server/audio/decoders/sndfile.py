"""FLAC, MP3 and AIFF through libsndfile, by file descriptor: no callback ever takes the lock."""

from __future__ import annotations

import os

import numpy as np
import soundfile

from asr_server.audio.decoders.base import Block, CannotOpen

BLOCK_SAMPLES = 1 << 17  # over all channels: 1.4 s of 48 kHz stereo


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
        self.truncated = False
        self._num_read = 0
        self._block_frames = max(1, BLOCK_SAMPLES // self.num_channels)

    def read(self) -> Block:
        block: Block = np.empty((self._block_frames, self.num_channels), np.float32)
        pointer = soundfile._ffi.cast("float *", block.ctypes.data)
        num_frames = int(soundfile._snd.sf_readf_float(self._file._file, pointer, self._block_frames))
        self._num_read += num_frames
        if num_frames < self._block_frames:
            self.truncated = self.truncated or self._falls_short()
        return block[:num_frames]

    def close(self) -> None:
        self._file.close()

    def _falls_short(self) -> bool:
        """Whether the file promised more, or was damaged; streams that know no length promise a huge one."""
        damaged = bool(soundfile._snd.sf_error(self._file._file))
        return damaged or self._num_read < self._file.frames < 1 << 60
