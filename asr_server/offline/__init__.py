"""`asr-server transcribe`: inputs, a transcriber for one file at a time, outputs. No HTTP, no torch."""

from asr_server.offline.job import TranscribeJob
from asr_server.offline.outputs import OutputError
from asr_server.offline.run import transcribe_files

__all__ = ["OutputError", "TranscribeJob", "transcribe_files"]
