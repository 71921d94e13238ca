"""Take one request from audio to text: chunks go to replicas, results return in file order.

Runs on the event loop, which it never blocks. Knows no HTTP and imports no torch.
"""

from asr_server.language_codes import Languages
from asr_server.transcription.request import (
    Labeller,
    Transcriber,
    TranscriptionSession,
    boosted_keywords,
    prompt_tokens,
)
from asr_server.transcription.tasks import StallLimits, first_error, task_group

__all__ = [
    "Labeller",
    "Languages",
    "StallLimits",
    "Transcriber",
    "TranscriptionSession",
    "boosted_keywords",
    "first_error",
    "prompt_tokens",
    "task_group",
]
