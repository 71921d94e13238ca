"""What the server and a decode process say to each other. Used by `forkserver.py` and `remote_stream.py`.

The server sends a `DecodeTask` with the file's descriptor, and then `NEXT` for each block that it wants. Each
answer is a `HEADER`, which says of what kind it is, and its content.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from asr_server.audio.limits import AudioLimits

HEADER: Final = struct.Struct("<BI")  # kind, bytes that follow
SAMPLES, END, REFUSED, OPENED = 0, 1, 2, 3
NEXT: Final = b"n"  # asks for a block
STATUS: Final = struct.Struct("<i")  # as waitpid gives it; the forkserver tells it


class DecodeTask(msgspec.Struct):
    """Goes to a decode process with the file."""

    limits: AudioLimits
    split_channels: bool


class Opened(msgspec.Struct):
    """Comes before the first samples."""

    duration_s: float | None  # by the file's header


class Finished(msgspec.Struct):
    truncated: bool


class Refused(msgspec.Struct):
    error: str  # the name of a class in `errors`
    message: str
