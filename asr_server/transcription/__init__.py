"""One request from audio to text: chunks out, results back in order, tokens to text."""

from asr_server.transcription.language import Languages
from asr_server.transcription.prompt import prompt_tokens
from asr_server.transcription.transcriber import Transcriber, TranscriptionSession, first_error

__all__ = ["Languages", "Transcriber", "TranscriptionSession", "first_error", "prompt_tokens"]
