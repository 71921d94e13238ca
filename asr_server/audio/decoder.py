"""The protocol of an open file that gives blocks (arrays of samples) of its own rate and layout.

Implemented by `wav.py` and `sndfile.py` in the preprocess threads, and by `ffmpeg_decoder.py` in the FFmpeg
processes. Types only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from asr_server.core import Track

Block = npt.NDArray[np.float32]  # [frames, channels] at the file's own rate, full scale is 1.0


class Decoder(Protocol):
    """One open file. Not thread-safe."""

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
        """The next block, of a few seconds at most; one without frames is the end. The next call may use
        its memory again: fresh memory for each block costs more than converting the samples does.

        Raises:
            InvalidAudio: nothing at all could be read.
        """
        ...

    def close(self) -> None: ...


class CannotOpen(Exception):
    """This decoder does not read this file; another one may."""
