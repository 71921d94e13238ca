"""The protocol of an open file that returns blocks of its own rate and layout."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from asr_server.core import Track

Block = npt.NDArray[np.float32]  # [frames, channels] at the file's own rate, full scale is 1.0


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
