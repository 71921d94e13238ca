"""The path of dynamic time warping: openai/whisper's, and the one on which each row has its own frames."""

import numpy as np
import numpy.typing as npt
import pytest

from asr_server.engine.alignment import first_frames

Matrix = npt.NDArray[np.float64]


@pytest.mark.parametrize("share_frames", [False, True])
def test_the_path_of_dynamic_time_warping_is_the_best_there_is(share_frames: bool) -> None:
    random = np.random.default_rng(0)
    for num_rows, num_frames in ((1, 1), (1, 5), (3, 3), (3, 5), (4, 6), (5, 5)):
        gain = random.normal(size=(num_rows, num_frames))
        assert first_frames(gain, share_frames).tolist() == _best_path(gain, share_frames)


def test_rows_share_frames_where_there_are_too_few() -> None:
    random = np.random.default_rng(0)
    for num_rows, num_frames in ((4, 1), (5, 4)):
        gain = random.normal(size=(num_rows, num_frames))
        assert first_frames(gain).tolist() == _best_path(gain, share_frames=True)


def _best_path(gain: Matrix, share_frames: bool) -> list[int]:
    """By trying every path."""
    num_rows, num_frames = gain.shape
    best: tuple[float, list[int]] = (-np.inf, [])

    def walk(row: int, frame: int, total: float, first: list[int]) -> None:
        nonlocal best
        total += gain[row, frame]
        if (row, frame) == (num_rows - 1, num_frames - 1) and total > best[0]:
            best = total, first
        for down, right in ((0, 1), (1, 1), *([(1, 0)] if share_frames else [])):
            if row + down < num_rows and frame + right < num_frames:
                walk(row + down, frame + right, total, [*first, frame + right] if down else first)

    walk(0, 0, 0.0, [0])
    return best[1]
