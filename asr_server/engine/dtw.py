"""Dynamic time warping, which lays a text's tokens along the frames of the audio in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.floating]


def first_frames(gain: Matrix, stay_costs: Matrix | None = None) -> npt.NDArray[np.intp]:
    """The frame with which each row begins on the path of the greatest sum, from the first row and frame to
    the last.

    A step of the path goes to the next row, to the next frame, or to both. Within a row the cheapest way to
    each frame is a running minimum: of what reaching an earlier frame from the row above costs, less the
    costs up to there. So a row is a few operations on arrays, and the way back needs one look a row.

    Args:
        gain: [rows, frames], what it is worth to have a row at a frame.
        stay_costs: [frames], what it costs that the row at a frame is that of the frame before.
    """
    num_rows, num_frames = gain.shape
    stayed = 0.0 if stay_costs is None else np.cumsum(stay_costs, dtype=np.float64)
    up_to = np.zeros((num_rows, num_frames + 1))  # costs of a row's frames before each one
    np.cumsum(-gain.astype(np.float64), axis=1, out=up_to[:, 1:])
    reached = np.full((num_rows + 1, num_frames + 1), np.inf)  # a row and a column before the first ones
    reached[0, 0] = 0.0
    entered = np.empty((num_rows, num_frames))
    for row in range(num_rows):
        above = reached[row]
        np.minimum(above[:-1], above[1:], out=entered[row])
        entered[row] -= up_to[row, :-1] + stayed
        np.minimum.accumulate(entered[row], out=reached[row + 1, 1:])
        reached[row + 1, 1:] += up_to[row, 1:] + stayed
    return _way_back(entered, reached)


def _way_back(entered: Matrix, reached: Matrix) -> npt.NDArray[np.intp]:
    first = np.empty(len(entered), np.intp)
    last = entered.shape[1] - 1  # frame of the row at hand
    for row in range(len(entered) - 1, -1, -1):
        first[row] = frame = int(np.argmin(entered[row, : last + 1]))
        both = reached[row, frame] < reached[row, frame + 1]
        last = frame - 1 if both else frame
    return first
