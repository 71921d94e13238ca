"""Where each token of a text attends to the audio most, the tokens in order. Used by `alignment.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def increasing_peaks(attention: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """A frame for each row, behind the frame of the row before, such that their attention sums up to the
    most.

    Each row's own greatest attention will not do: now and then it lies on another word, often on the
    same word said again, and a pause would be looked for on the wrong side.

    Args:
        attention: [rows, frames]. Where there are more rows than frames, neighbours may share one.
    """
    num_rows, num_frames = attention.shape
    step = 1 if num_rows <= num_frames else 0
    reached = np.full((num_rows, num_frames), -np.inf)  # the greatest sum with a row at a frame
    reached[0] = attention[0]
    for row in range(1, num_rows):
        before = np.maximum.accumulate(reached[row - 1])
        reached[row, step:] = attention[row, step:] + before[: num_frames - step]
    frames, limit = np.empty(num_rows, np.intp), num_frames
    for row in range(num_rows - 1, -1, -1):
        frames[row] = np.argmax(reached[row, :limit])
        limit = int(frames[row]) + 1 - step
    return frames
