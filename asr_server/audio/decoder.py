"""The protocol of an open file that returns blocks of its own rate and layout."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server.audio.limits import AudioLimits
from asr_server.audio.tracks import DEFAULT_TRACK, TrackChoice
from asr_server.core import Track

Block = npt.NDArray[np.float32]  # [frames, channels] at the file's own rate, full scale is 1.0


class DecodeTask(msgspec.Struct, frozen=True):
    """One file to decode, and how."""

    limits: AudioLimits = AudioLimits()
    split_channels: bool = False
    choice: TrackChoice = DEFAULT_TRACK
    channel: int | None = None  # alone; None: all


class FileInfo(msgspec.Struct, frozen=True):
    duration_s: float | None = None  # by the file's header
    num_channels: int = 1
    tracks_read: tuple[Track, ...] = ()
    truncated: bool = False  # known at the end


class Decoder(Protocol):
    sample_rate: int
    num_channels: int
    duration_s: float | None  # what the file's header says, which need not be so; None: nothing
    has_exact_duration: bool  # the header's length is the one that will be read
    layout: tuple[str, ...]  # FFmpeg's names of the channels; empty: unknown
    tracks_read: tuple[Track, ...]  # of a file that has several
    is_float: bool  # the file's own numbers are floats: there may be NaN and infinity among them
    truncated: bool  # known at the end: the file promised more than it held, or was damaged on the way
    has_more: bool  # known at the end: this decoder stopped where another one may be able to go on

    def read(self) -> Block:
        """Return the next block, a few seconds at most; an empty one is the end. The next call may reuse
        its memory.

        Raises:
            InvalidAudio: nothing could be read.
        """
        ...

    def close(self) -> None: ...


class CannotOpen(Exception):
    pass


def id3_size(data: bytes) -> int:
    """Return the length of the ID3 tag at the start of `data`, 0 without one (ID3v2.4, 3.1)."""
    if not data.startswith(b"ID3") or len(data) < 10:
        return 0
    size = sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
    return 10 + size + (10 if data[5] & 0x10 else 0)
