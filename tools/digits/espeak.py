"""espeak-ng through its C library: thousands of short utterances in one process."""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass

import numpy as np
import soxr

from .clips import SAMPLE_RATE, Samples

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS of speak_lib.h: the callback runs before espeak_Synth returns
_UTF8 = 1
_RATE, _PITCH, _RANGE = 1, 3, 4
_ARRIVED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class EspeakVoice:
    """One way to speak: language, variant (timbre), words a minute, pitch and range 0 to 99."""

    language: str
    variant: str
    rate_wpm: int
    pitch: int
    pitch_range: int

    def __str__(self) -> str:
        return f"espeak/{self.variant}/{self.language}-{self.rate_wpm}-{self.pitch}-{self.pitch_range}"


class Espeak:
    """The library, initialised once per process."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise RuntimeError("libespeak-ng is missing: run tools/digits/install-voices.sh")
        self._library = ctypes.CDLL(name)
        self._rate_hz = int(self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, 0))
        self._blocks: list[Samples] = []
        self._callback = _ARRIVED(self._collect)  # kept: ctypes does not hold it for us
        self._library.espeak_SetSynthCallback(self._callback)

    def _collect(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _events: int | None) -> int:
        if count > 0:
            self._blocks.append(np.ctypeslib.as_array(samples, (count,)).astype(np.int16))
        return 0

    def say(self, text: str, voice: EspeakVoice) -> Samples:
        """The text as 16 kHz mono."""
        self._blocks.clear()
        self._library.espeak_SetVoiceByName(f"{voice.language}+{voice.variant}".encode())
        for parameter, value in ((_RATE, voice.rate_wpm), (_PITCH, voice.pitch), (_RANGE, voice.pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        raw = text.encode() + b"\0"
        self._library.espeak_Synth(raw, len(raw), 0, 0, 0, _UTF8, None, None)
        if not self._blocks:
            return np.zeros(0, np.int16)
        resampled: Samples = soxr.resample(np.concatenate(self._blocks), self._rate_hz, SAMPLE_RATE)
        return resampled
