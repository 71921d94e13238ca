"""Whisper in torch: log-mel, encoder, decoder, and the weights of any Hugging Face checkpoint."""

from asr_server.model.features import LogMel
from asr_server.model.sizes import WhisperSizes
from asr_server.model.weights import CheckpointError, load_whisper, resolve_checkpoint
from asr_server.model.whisper import DecoderCache, Whisper

__all__ = ["CheckpointError", "DecoderCache", "LogMel", "Whisper", "WhisperSizes", "load_whisper", "resolve_checkpoint"]
