"""Who speaks in each window, by the real model."""

import numpy as np
import pytest

from asr_server.annexes.speakers.clustering import Floats
from asr_server.annexes.speakers.segmentation import STEP, WINDOW, segment
from asr_server.core import Samples
from tests.unit.speakers.people import TALK, join

NUM_WINDOWS = 3


@pytest.fixture(scope="module")
def talk() -> Samples:
    return join([said for _, said in TALK])[0][: WINDOW + (NUM_WINDOWS - 1) * STEP]


def windows_of(samples: Samples) -> list[Samples]:
    return [samples[first * STEP : first * STEP + WINDOW] for first in range(NUM_WINDOWS)]


def differs(one: Floats, other: Floats) -> float:
    """The share of frames in which another class is the likeliest."""
    return float(np.mean(one.argmax(axis=-1) != other.argmax(axis=-1)))


@pytest.mark.parametrize(
    ("num_samples", "num_windows"),
    [*((0, 1), (160_000, 1), (160_001, 2), (239_920, 2), (239_921, 3), (319_840, 3), (319_841, 4))],
)
def test_a_window_of_ten_seconds_begins_every_five(num_samples: int, num_windows: int) -> None:
    silent = np.full(num_samples, 1e-4, np.float32)
    found = segment(silent)
    assert found.shape == (num_windows, 589, 7)
    assert not found.argmax(axis=-1).any()
    assert np.isneginf(found[:, :, 1:]).all()
    assert not found[:, :, 0].any()


def test_windows_run_together_are_those_run_alone(talk: Samples) -> None:
    found, alone = segment(talk), np.stack([segment(window)[0] for window in windows_of(talk)])
    assert np.abs(np.exp(found) - np.exp(alone)).mean() < 0.005  # activations in 8 bits
    assert differs(found, alone) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "added"), [(0.02, 0.0), (1.0, 0.3)])
def test_neither_level_nor_an_offset_changes_who_speaks(talk: Samples, factor: float, added: float) -> None:
    changed = talk * np.float32(factor) + np.float32(added)
    assert differs(segment(changed), segment(talk)) < 0.05


def test_nobody_speaks_in_a_window_without_sound_between_others(talk: Samples) -> None:
    recording = talk.copy()
    recording[STEP : STEP + WINDOW] = 0
    found = segment(recording)
    assert not found[1].argmax(axis=-1).any()
    assert found[0].argmax(axis=-1).any()
