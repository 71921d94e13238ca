"""Transcribes recordings, for `asr-server transcribe`: in this process, or as `remote` does.

Inputs go through a transcriber, one recording at a time, to outputs. Knows no HTTP and imports no torch.
"""

from asr_server.offline.job import TranscribeJob
from asr_server.offline.manifest.run import transcribe_manifest
from asr_server.offline.outputs import OutputError
from asr_server.offline.run import transcribe_files
from asr_server.offline.transcriber import LocalTranscriber

__all__ = ["LocalTranscriber", "OutputError", "TranscribeJob", "transcribe_files", "transcribe_manifest"]
