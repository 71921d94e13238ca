"""Take one request from audio to text, on the event loop. Knows no HTTP and imports no torch."""

from asr_server.language_codes import Languages
from asr_server.transcription.request import (
    Labeller,
    OpenRequest,
    Transcriber,
    TranscriptionSession,
    boosted_keywords,
    prompt_tokens,
)
from asr_server.transcription.tasks import StallLimits, first_error, task_group

__all__ = [
    "Labeller",
    "Languages",
    "OpenRequest",
    "StallLimits",
    "Transcriber",
    "TranscriptionSession",
    "boosted_keywords",
    "first_error",
    "prompt_tokens",
    "task_group",
]
