"""Tokens to text and back, from a checkpoint's own files. Needs no torch."""

from asr_server.tokenizer.specials import SpecialTokens
from asr_server.tokenizer.timestamps import Timestamps
from asr_server.tokenizer.tokenizer import Tokenizer

__all__ = ["SpecialTokens", "Timestamps", "Tokenizer"]
