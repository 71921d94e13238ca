"""The path of dynamic time warping, and what pauses change about it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from asr_server.engine.dtw import first_frames
from asr_server.engine.token_times import token_frames

Matrix = npt.NDArray[np.float64]
NO_PAUSES = np.empty((0, 2))


def test_the_path_of_dynamic_time_warping_is_the_best_there_is() -> None:
    random = np.random.default_rng(0)
    for num_rows, num_frames in ((1, 1), (1, 5), (4, 1), (3, 5), (5, 4)):
        gain = random.normal(size=(num_rows, num_frames))
        assert first_frames(gain).tolist() == _best_path(gain, np.zeros(num_frames))
        stay_costs = random.random(num_frames)
        assert first_frames(gain, stay_costs).tolist() == _best_path(gain, stay_costs)


def _best_path(gain: Matrix, stay_costs: Matrix) -> list[int]:
    """By trying every path."""
    num_rows, num_frames = gain.shape
    best: tuple[float, list[int]] = (-np.inf, [])

    def walk(row: int, frame: int, total: float, first: list[int]) -> None:
        nonlocal best
        total += gain[row, frame]
        if (row, frame) == (num_rows - 1, num_frames - 1) and total > best[0]:
            best = total, first
        for down, right in ((0, 1), (1, 0), (1, 1)):
            if row + down < num_rows and frame + right < num_frames:
                cost = 0.0 if down else stay_costs[frame + right]
                walk(row + down, frame + right, total - cost, [*first, frame + right] if down else first)

    walk(0, 0, 0.0, [0])
    return best[1]


def attention_at(*places: int, num_frames: int = 60) -> Matrix:
    """[rows, frames]: each row attends to six frames from its place on."""
    attention = np.zeros((len(places), num_frames))
    for row, place in enumerate(places):
        attention[row, place : place + 6] = 2.0
    return attention


def test_no_token_lasts_through_a_pause_for_which_another_was_said() -> None:
    gain = attention_at(0, 40, 42, 55)  # the second and the third attend to the same sound
    pauses = np.array([(0.2, 0.4), (0.6, 0.8), (1.0, 1.2)])
    plain = token_frames(gain, gain, NO_PAUSES, 0.02)
    assert plain.first[2] > 40, "or the test proves nothing"
    parted = token_frames(gain, gain, pauses, 0.02)
    assert parted.first.tolist() == [0, 15, 35, 55]
    assert all(first <= peak < end for first, peak, end in zip(*parted, [15, 35, 55, 60], strict=True))


@pytest.mark.parametrize("pauses", [[(0.3, 0.36)], [(0.0, 0.6)]])
def test_a_closure_within_a_word_and_the_pause_before_the_first_change_nothing(
    pauses: list[tuple[float, float]],
) -> None:
    gain = attention_at(12, 40, 55)
    plain = token_frames(gain, gain, NO_PAUSES, 0.02)
    assert token_frames(gain, gain, np.array(pauses), 0.02).first.tolist() == plain.first.tolist()


def test_peaks_of_more_tokens_than_positions_never_run_backwards() -> None:
    gain = np.random.default_rng(0).random((9, 4))
    peaks = token_frames(gain, gain, NO_PAUSES, 0.02).peaks.tolist()
    assert peaks == sorted(peaks)
