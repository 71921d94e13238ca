"""Decodes recordings of any format to 16 kHz mono and cuts them into chunks, in threads of its own.

The transcription package uses it. It knows neither HTTP nor the engine.
"""

from asr_server.audio.limits import FORMATS, AudioLimits
from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import Cancelled, DecodeSlice, Recording
from asr_server.audio.voice import holds_speech, next_speech_s, possible_speech_s

__all__ = [
    "FORMATS",
    "AudioLimits",
    "Cancelled",
    "DecodeSlice",
    "PreprocessPool",
    "Recording",
    "holds_speech",
    "next_speech_s",
    "possible_speech_s",
]
