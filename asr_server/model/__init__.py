"""Whisper in torch: log-mel, encoder, decoder and checkpoint weights.

Runs in the replica's process; used by `engine`. Knows no requests.
"""

from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.model.cache import DecoderCache
from asr_server.model.layers import WHOLE, Shard
from asr_server.model.weights import load_whisper
from asr_server.model.whisper import Whisper

__all__ = ["WHOLE", "DecoderCache", "Shard", "Whisper", "WhisperSizes", "load_whisper"]
