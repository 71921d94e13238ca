"""Converts the audio that clients send to 16 kHz: 24 kHz PCM, G.711 µ-law and A-law. Used by `session.py`."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from asr_server.api.realtime.client_events import AlawFormat, AudioFormat, PcmFormat
from asr_server.audio.g711 import A_LAW, MU_LAW
from asr_server.audio.resample import Mono16k
from asr_server.core import Samples

_SCALE: Final = np.float32(1 / 2**15)


class AudioInput:
    """Takes bytes as they come; a sample may be cut between two appends."""

    def __init__(self, format: AudioFormat) -> None:
        self._format = format
        self._rest = b""  # half a sample
        self._resampler = self._new_resampler()

    def push(self, data: bytes) -> Samples:
        samples = self._decode(data)
        return self._resampler.push(samples[:, None]) if len(samples) else samples

    def flush(self) -> Samples:
        """What the resampling filter has held back. The next `push` begins anew."""
        samples = self._resampler.finish()
        self._resampler = self._new_resampler()
        return samples

    def _new_resampler(self) -> Mono16k:
        return Mono16k(24_000 if isinstance(self._format, PcmFormat) else 8_000, 1, is_float=False)

    def _decode(self, data: bytes) -> Samples:
        if not isinstance(self._format, PcmFormat):
            table = A_LAW if isinstance(self._format, AlawFormat) else MU_LAW
            return table[np.frombuffer(data, np.uint8)]
        data = self._rest + data
        num_whole = len(data) // 2 * 2
        self._rest = data[num_whole:]
        values: npt.NDArray[np.int16] = np.frombuffer(data[:num_whole], "<i2")
        return values.astype(np.float32) * _SCALE
