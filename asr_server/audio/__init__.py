"""The front end: any recording to chunks of 16 kHz mono, slice by slice, in threads of its own."""

from asr_server.audio.limits import FORMATS, MIN_AUDIO_S, AudioLimits
from asr_server.audio.pool import PreprocessPool, PreprocessStats
from asr_server.audio.recording import Cancelled, DecodeSlice, Recording

__all__ = [
    "FORMATS",
    "MIN_AUDIO_S",
    "AudioLimits",
    "Cancelled",
    "DecodeSlice",
    "PreprocessPool",
    "PreprocessStats",
    "Recording",
]
