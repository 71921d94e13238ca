"""Transcribes recordings on a server elsewhere, for `asr-server transcribe --url`.

Takes the place of `offline`'s local transcriber. The only package that speaks HTTP as a client.
"""

from asr_server.remote.transcriber import RemoteServer, RemoteTranscriber

__all__ = ["RemoteServer", "RemoteTranscriber"]
