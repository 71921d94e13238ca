"""Tell up to three local speakers apart in windows of ten seconds.

Runs segmentation-3.0 in three graphs: filters once for overlapping windows, convolutions a window, and
the LSTM over several windows, which halves its time. Blocks; keeps no samples.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from asr_server.annexes.speakers.clustering import Floats
from asr_server.audio.voice import load_onnx
from asr_server.core import SAMPLE_RATE, Samples

FOLDER: Final = Path(__file__).parents[2] / "models" / "speakers"
FILTERS, CONVOLUTIONS, LSTM = "filters.onnx", "convolutions.onnx", "lstm.onnx"  # of the segmentation
EMBEDDING: Final = "embedding.onnx"


@cache
def load(name: str) -> Any:
    """Return a session of onnxruntime."""
    return load_onnx(FOLDER / name)


WINDOW: Final = 10 * SAMPLE_RATE
FRAME: Final = 270  # samples between two frames
FRAME_S: Final = FRAME / SAMPLE_RATE
FIRST_FRAME: Final = 495  # sample in the middle of the first one's field of view
NUM_FRAMES: Final = (WINDOW - 2 * FIRST_FRAME) // FRAME + 1  # of a window
STEP_FRAMES: Final = 296  # half a window, 5 s: all but a recording's ends is heard twice
STEP: Final = STEP_FRAMES * FRAME  # samples from one window to the next
# Which local speakers each class says are speaking.
CLASSES: Final = np.array(
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], np.float32
)
_NOBODY: Final = np.array([0.0, *[-np.inf] * 6], np.float32)  # the log-probabilities of a frame
_AUDIBLE: Final = 1e-4
_POSITION, _FIELD = 30, 271  # samples between two positions of the filters, and that one position sees
_WINDOW_POSITIONS: Final = (WINDOW - _FIELD) // _POSITION + 1
_PART: Final = STEP - _POSITION + _FIELD  # samples that the positions of one step see


def segment(samples: Samples) -> Floats:
    """Return log-probabilities [num_windows, num_frames, 7], a window every STEP; silent ones have nobody."""
    num_windows = max(1, -(-(len(samples) - WINDOW) // STEP) + 1)
    padded = _padded(samples, WINDOW + (num_windows - 1) * STEP)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::STEP]
    audible = [number for number, window in enumerate(windows) if np.abs(window).max() > _AUDIBLE]
    log_probabilities = np.tile(_NOBODY, (num_windows, NUM_FRAMES, 1))
    if audible:
        needed = {part for number in audible for part in (number, number + 1)}
        parts = {part: _filtered(padded[part * STEP :]) for part in needed}
        features = [_features(windows[number], parts[number], parts[number + 1]) for number in audible]
        (log_probabilities[audible],) = load(LSTM).run(None, {"features": np.concatenate(features)})
    return log_probabilities


def _filtered(samples: Samples) -> Floats:
    (filtered,) = load(FILTERS).run(None, {"samples": _padded(samples[:_PART], _PART)[None]})
    return np.asarray(filtered, np.float32)


def _features(window: Samples, *parts: Floats) -> Floats:
    filtered = np.concatenate(parts, axis=2)[:, :, :_WINDOW_POSITIONS]
    mean, variance = (np.full((1, 1, 1), each) for each in (window.mean(), window.var()))
    inputs = {"filtered": filtered, "mean": mean, "variance": variance}
    (features,) = load(CONVOLUTIONS).run(None, inputs)
    return np.asarray(features, np.float32)


def _padded(samples: Samples, num_samples: int) -> Samples:
    return np.pad(samples, (0, num_samples - len(samples))) if len(samples) < num_samples else samples
