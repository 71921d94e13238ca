"""Detect speech with Silero's detector. Decides nothing about text.

The weights are silero-vad's (MIT), in a graph that takes a third of the time
(`tools/make_voice_detector.py`). onnxruntime scores many frames a call without the interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import Interval, runs
from asr_server.machine import VNNI_FLAGS, cpu_flags

# Read when onnxruntime is loaded. From 1.29 on it would tell Microsoft what it runs, and keep an identifier
# of this machine and a database in the home folder.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

FRAME: Final = 512  # samples for which the detector gives one probability
FRAME_S: Final = FRAME / SAMPLE_RATE
CONTEXT: Final = 64  # samples before the frame that it sees too
HALF_WINDOW: Final = 128  # samples: also the step between the four windows of a frame
NUM_WINDOWS: Final = 4
STATE_SHAPE: Final = (1, 1, 128)
MAX_FRAMES: Final = 128  # in a call: 4 s, quicker than 2 s and than 8
# Speech goes on at a probability lower by this than the one that starts it: Silero's rule.
HYSTERESIS: Final = 0.15
# Where somebody certainly speaks, and begins to behind a pause (`first_missed_s`).
POSSIBLE: Final = 0.4  # of every frame
MIN_POSSIBLE_FRAMES: Final = 4  # 128 ms
CERTAIN: Final = 0.9
MIN_CERTAIN_FRAMES: Final = 5  # 160 ms
PAUSE_S: Final = 31 * FRAME_S  # what comes sooner may have got a text with a time that is too early
# What the detector gets of samples that stand alone.
EVEN_PEAK: Final = 0.3
BELOW_CLICKS: Final = 0.999  # of the samples, by their size
FAINTEST_PEAK: Final = 1e-4
BURST_BLOCK: Final = SAMPLE_RATE // 100
BELOW_BURSTS: Final = 0.8  # of the blocks, by their peaks: what the rest is as loud as
BURST: Final = 20.0  # times as loud as the rest (26 dB)
FAINTEST_REST: Final = 0.001  # -60 dBFS: what is fainter is the noise of a microphone
HUM_PERIOD: Final = SAMPLE_RATE // 10  # of the mains' hum, at 50, 60 and 100 Hz alike
HUM_RESIDUE: Final = 0.1  # of its power, by which a period may differ from the next one; of speech 0.03 % do
SILENCE: Final = 3 * FRAME  # before them and behind
DETECTOR: Final = Path(__file__).parents[1] / "models" / "silero-vad" / "detector.onnx"

Probabilities = npt.NDArray[np.float32]  # [num_frames], that somebody speaks


class VoiceDetector:
    """Score each whole frame of consecutive samples: 0.15 ms for a frame, 0.25 ms for eight."""

    def __init__(self) -> None:
        # The context of the next frame, and what there is of the frame.
        self._rest = np.zeros(CONTEXT, np.float32)
        self._state = np.zeros(STATE_SHAPE, np.float32), np.zeros(STATE_SHAPE, np.float32)
        self._session = _session()

    def push(self, samples: Samples) -> Probabilities:
        held = np.concatenate([self._rest, samples])
        ends = range(CONTEXT + FRAME, len(held) + 1, FRAME)
        self._rest = held[len(ends) * FRAME :]
        if not ends:
            return np.empty(0, np.float32)
        calls = [ends[at : at + MAX_FRAMES] for at in range(0, len(ends), MAX_FRAMES)]
        return np.concatenate([self._run(held[call[0] - CONTEXT - FRAME : call[-1]]) for call in calls])

    def finish(self) -> Probabilities:
        missing = CONTEXT + FRAME - len(self._rest)
        return self.push(np.zeros(missing, np.float32)) if missing < FRAME else np.empty(0, np.float32)

    def _run(self, samples: Samples) -> Probabilities:
        even, odd = _window_parts(samples)
        h, c = self._state
        probabilities, h, c = self._session.run(None, {"even": even, "odd": odd, "h": h, "c": c})
        self._state = h, c
        return np.asarray(probabilities, np.float32)


def _window_parts(samples: Samples) -> tuple[Samples, Samples]:
    """Return each window's sum and difference around its middle, [num_windows, HALF_WINDOW] each.

    The last window ends with a mirror of the frame.
    """
    windows = _strided(np.append(samples, samples[-CONTEXT:]), 2 * HALF_WINDOW, HALF_WINDOW)
    before, after = windows[:, 1 : HALF_WINDOW + 1], windows[:, : HALF_WINDOW - 1 : -1]
    even, odd = before + after, before - after
    frames = _strided(samples, CONTEXT + FRAME, FRAME)
    before, mirror = frames[:, -3 * CONTEXT + 1 : -2 * CONTEXT + 1], frames[:, -CONTEXT - 1 : -1]
    last = slice(NUM_WINDOWS - 1, None, NUM_WINDOWS)
    even[last, :CONTEXT], odd[last, :CONTEXT] = before + mirror, before - mirror
    return even, odd


def _strided(samples: Samples, size: int, step: int) -> npt.NDArray[np.float32]:
    """Return a view [num_parts, size], a part every `step` samples; `sliding_window_view` is slow."""
    shape, strides = ((len(samples) - size) // step + 1, size), (step * samples.itemsize, samples.itemsize)
    return np.ndarray(shape, samples.dtype, samples, strides=strides)


def speech_probabilities(samples: Samples) -> Probabilities:
    detector = VoiceDetector()
    return np.concatenate([detector.push(samples), detector.finish()])


def possible_and_certain_s(frames: Probabilities) -> tuple[list[Interval], list[Interval]]:
    return (
        _intervals_s(frames, 0.0, MIN_POSSIBLE_FRAMES),
        _intervals_s(frames, CERTAIN, MIN_CERTAIN_FRAMES),
    )


def _intervals_s(probabilities: Probabilities, threshold: float, min_frames: int) -> list[Interval]:
    return [
        (first * FRAME_S, end * FRAME_S)
        for first, end in runs(is_speech(probabilities, POSSIBLE)).tolist()
        if (probabilities[first:end] >= threshold).sum() >= min_frames
    ]


def first_missed_s(speech_s: Iterable[Interval]) -> float | None:
    """Return where speech first begins behind a pause, which may begin at 0."""
    spoken_to_s = 0.0
    for start_s, end_s in speech_s:
        if start_s - spoken_to_s >= PAUSE_S:
            return start_s
        spoken_to_s = end_s
    return None


def frames_of(samples: Samples) -> Probabilities:
    """Score samples that stand alone, by frames: evened, as short words alone are missed otherwise."""
    if not len(samples):
        return np.empty(0, np.float32)
    centred = _without_hum(samples - np.float32(samples.mean(dtype=np.float64)))
    heard = _score_evened(centred)
    calm = _without_bursts(centred)  # bursts drown the rest: with or without them, the likelier counts
    return heard if calm is None else np.maximum(heard, _score_evened(calm))


def _score_evened(centred: Samples) -> Probabilities:
    silence = np.zeros(SILENCE, np.float32)
    return speech_probabilities(np.concatenate([silence, _evened(centred), silence]))[SILENCE // FRAME :]


def _evened(centred: Samples) -> Samples:
    peak = max(float(np.quantile(np.abs(centred), BELOW_CLICKS)), FAINTEST_PEAK)
    evened: Samples = np.clip(centred * np.float32(EVEN_PEAK / peak), -1, 1)
    return evened


def _without_bursts(centred: Samples) -> Samples | None:
    """Return the samples with thumps as quiet as the rest; None where there are none."""
    num_blocks = len(centred) // BURST_BLOCK
    blocks = centred[: num_blocks * BURST_BLOCK].reshape(num_blocks, BURST_BLOCK)
    peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    rest = float(np.quantile(peaks, BELOW_BURSTS)) if num_blocks else 0.0
    if rest < FAINTEST_REST or peaks.max() < BURST * rest:
        return None
    padded = np.pad(np.minimum(1, rest / np.maximum(peaks, rest)), 1, mode="edge")
    gains = np.minimum(np.minimum(padded[:-2], padded[1:-1]), padded[2:])  # whole before a burst begins
    middles = (np.arange(num_blocks) + 0.5) * BURST_BLOCK
    calm: Samples = centred * np.interp(np.arange(len(centred)), middles, gains).astype(np.float32)
    return calm


def _without_hum(samples: Samples) -> Samples:
    """Subtract neighbouring periods that are nearly equal: buzzing is no voice."""
    num_periods = len(samples) // HUM_PERIOD
    end = num_periods * HUM_PERIOD
    periods = samples[:end].reshape(num_periods, HUM_PERIOD)
    changes = periods[1:] - periods[:-1]
    limits = HUM_RESIDUE * np.einsum("ij,ij->i", periods, periods)
    powers = np.einsum("ij,ij->i", changes, changes)
    is_like_next, is_like_last = powers < limits[:-1], powers < limits[1:]
    if not is_like_last.any() and not is_like_next.any():
        return samples
    rest = samples.copy()
    rest_periods = rest[:end].reshape(num_periods, HUM_PERIOD)
    rest_periods[:-1][is_like_next] = changes[is_like_next]
    rest_periods[1:][is_like_last] = changes[is_like_last]
    if is_like_last[-1]:
        rest[end:] -= samples[end - HUM_PERIOD : -HUM_PERIOD]
    return rest


def is_speech(probabilities: Probabilities, threshold: float, was_speech: bool = False) -> list[bool]:
    """Return whether each frame is speech, with hysteresis below the threshold."""
    flags: list[bool] = []
    for probability in probabilities.tolist():
        was_speech = probability >= threshold - (HYSTERESIS if was_speech else 0.0)
        flags.append(was_speech)
    return flags


@cache
def _session() -> InferenceSession:
    return load_onnx(DETECTOR)


def load_onnx(path: Path) -> InferenceSession:
    """Load a model for any thread, one thread a call. It keeps the memory of its largest call."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # parallelism is between files
    options.log_severity_level = 3
    if not cpu_flags() & VNNI_FLAGS:
        # Pairs of 8-bit products are added in 16 bits, which overflow with signed weights: this has them made
        # unsigned. With VNNI it would cost half as much again.
        options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
