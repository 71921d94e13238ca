"""Decodes recordings of any format to 16 kHz mono and cuts them into chunks, in threads of its own.

The transcription package uses it. It knows neither HTTP nor the engine.
"""

from asr_server.audio.limits import FORMATS, MIN_AUDIO_S, AudioLimits
from asr_server.audio.pool import PreprocessPool, PreprocessStats
from asr_server.audio.recording import Cancelled, DecodeSlice, Recording
from asr_server.audio.voice import holds_speech, next_speech_s

__all__ = [
    "FORMATS",
    "MIN_AUDIO_S",
    "AudioLimits",
    "Cancelled",
    "DecodeSlice",
    "PreprocessPool",
    "PreprocessStats",
    "Recording",
    "holds_speech",
    "next_speech_s",
]
