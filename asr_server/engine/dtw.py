"""Dynamic time warping, which lays a text's tokens along the frames of the audio in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.floating]


def first_frames(gain: Matrix, share_frames: bool = False) -> npt.NDArray[np.intp]:
    """The frame with which each row begins on the path of the greatest sum, from the first row and frame to
    the last.

    A step of the path goes to the next frame, and stays in its row or goes on to the next one, so that every
    row has a frame of its own. Within a row the cheapest way to each frame is a running minimum: of what
    reaching an earlier frame from the row above costs, less the costs up to there. So a row is a few
    operations on arrays, and the way back needs one look a row.

    Args:
        gain: [rows, frames], what it is worth to have a row at a frame.
        share_frames: a step may also go to the next row in the same frame, as openai/whisper's path does.
            More rows than frames cannot do otherwise.
    """
    num_rows, num_frames = gain.shape
    share_frames = share_frames or num_rows > num_frames
    up_to = np.zeros((num_rows, num_frames + 1))  # costs of a row's frames before each one
    np.cumsum(-gain.astype(np.float64), axis=1, out=up_to[:, 1:])
    reached = np.full((num_rows + 1, num_frames + 1), np.inf)  # a row and a column before the first ones
    reached[0, 0] = 0.0
    entered = np.empty((num_rows, num_frames))
    for row in range(num_rows):
        above = reached[row]
        np.minimum(above[:-1], above[1:] if share_frames else np.inf, out=entered[row])
        entered[row] -= up_to[row, :-1]
        np.minimum.accumulate(entered[row], out=reached[row + 1, 1:])
        reached[row + 1, 1:] += up_to[row, 1:]
    return _way_back(entered, reached, share_frames)


def _way_back(entered: Matrix, reached: Matrix, share_frames: bool) -> npt.NDArray[np.intp]:
    first = np.empty(len(entered), np.intp)
    last = entered.shape[1] - 1  # frame of the row at hand
    for row in range(len(entered) - 1, -1, -1):
        first[row] = frame = int(np.argmin(entered[row, : last + 1]))
        is_shared = share_frames and reached[row, frame] >= reached[row, frame + 1]
        last = frame if is_shared else frame - 1
    return first
