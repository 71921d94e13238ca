"""Transcribes recordings without a server, for `asr-server transcribe`.

Inputs go through a transcriber, one recording at a time, to outputs. Knows no HTTP and imports no torch.
"""

from asr_server.offline.job import TranscribeJob
from asr_server.offline.manifest.run import transcribe_manifest
from asr_server.offline.outputs import OutputError
from asr_server.offline.run import transcribe_files

__all__ = ["OutputError", "TranscribeJob", "transcribe_files", "transcribe_manifest"]
