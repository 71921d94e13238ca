"""Converts the audio that clients send to 16 kHz: 24 kHz PCM, G.711 µ-law and A-law. Used by `session.py`."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from asr_server.api.realtime.client_events import AlawFormat, AudioFormat, PcmFormat
from asr_server.audio.resample import Mono16k
from asr_server.core import Samples

_SCALE: Final = np.float32(1 / 2**15)
_BYTES: Final = np.arange(256, dtype=np.int32)


def _ulaw_values() -> Samples:
    """ITU-T G.711: all bits inverted; sign, 3 bits of exponent, 4 of mantissa, a bias of 132."""
    code = _BYTES ^ 0xFF
    magnitude = ((((code & 0x0F) << 3) + 132) << ((code & 0x70) >> 4)) - 132
    return (np.where(code & 0x80, -magnitude, magnitude) * _SCALE).astype(np.float32)


def _alaw_values() -> Samples:
    """ITU-T G.711: even bits inverted; sign, 3 bits of exponent, 4 of mantissa, linear at the bottom."""
    code = _BYTES ^ 0x55
    exponent, mantissa = (code & 0x70) >> 4, (code & 0x0F) << 4
    magnitude = np.where(exponent, (mantissa + 0x108) << np.maximum(exponent - 1, 0), mantissa + 8)
    return (np.where(code & 0x80, magnitude, -magnitude) * _SCALE).astype(np.float32)


_ULAW: Final = _ulaw_values()
_ALAW: Final = _alaw_values()


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
            table = _ALAW if isinstance(self._format, AlawFormat) else _ULAW
            return table[np.frombuffer(data, np.uint8)]
        data = self._rest + data
        num_whole = len(data) // 2 * 2
        self._rest = data[num_whole:]
        values: npt.NDArray[np.int16] = np.frombuffer(data[:num_whole], "<i2")
        return values.astype(np.float32) * _SCALE
