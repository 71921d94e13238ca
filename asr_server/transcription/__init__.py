"""One request's course: chunks out, results back in order, tokens to text."""

from asr_server.transcription.language import Languages
from asr_server.transcription.prompt import prompt_tokens
from asr_server.transcription.transcriber import Course, Transcriber, first_error

__all__ = ["Course", "Languages", "Transcriber", "first_error", "prompt_tokens"]
