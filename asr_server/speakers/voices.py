"""Hears who speaks when in a window of ten seconds, and what each voice is like.

Segmentation-3.0 tells up to three local speakers of a window apart, two of them at once; CAM++ makes an
embedding of what each of them says alone, of features that are Kaldi's (`feature-fbank.cc`: 80 mel bands, 25
ms, Povey's window), with their mean removed. Blocks: runs in threads of its own, in the API process. Used by
`track.py`. Keeps no samples.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.speakers.models import EMBEDDING, SEGMENTATION, load

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

WINDOW: Final = 10 * SAMPLE_RATE
FRAME: Final = 270  # samples between two frames of the segmentation
FRAME_S: Final = FRAME / SAMPLE_RATE
FIRST_FRAME: Final = 495  # sample in the middle of the first one's field of view
NUM_FRAMES: Final = (WINDOW - 2 * FIRST_FRAME) // FRAME + 1  # of a window
NUM_LOCAL: Final = 3
# Which local speakers each class says are speaking.
_CLASSES: Final = np.array(
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], np.float32
)
_MIN_FEATURES: Final = 30  # 0.3 s: less says nothing about a voice
_MAX_FEATURES: Final = 250  # more of one voice in a window says little more, and costs as much again
_STRETCH: Final = 100  # positions that share a gate of CAM++


class Voice(NamedTuple):
    """One local speaker of one window."""

    activity: npt.NDArray[np.float16]  # [num_frames]: how likely it speaks
    embedding: Floats  # [192] of length 1; zeros where too little is heard
    clean_s: float  # how much the embedding has heard


def hear(samples: Samples) -> list[Voice]:
    """The local speakers of at most one window of samples. Raises SpeakersUnavailable."""
    num_frames = max(0, (len(samples) - FIRST_FRAME) // FRAME + 1)
    padded = np.pad(samples, (0, WINDOW - len(samples))) if len(samples) < WINDOW else samples
    if not np.abs(samples).max(initial=0) > 1e-4:
        return []
    (log_probabilities,) = load(SEGMENTATION).run(None, {"samples": padded[None]})
    activity = np.exp(log_probabilities[0]) @ _CLASSES  # [num_frames, 3]
    active = _CLASSES[np.argmax(log_probabilities[0], axis=1)] > 0
    activity[num_frames:], active[num_frames:] = 0, False
    if not active.any():
        return []
    alone = active & (active.sum(axis=1, keepdims=True) == 1)
    voices = []
    for speaker in range(NUM_LOCAL):
        if active[:, speaker].any():
            chosen = _feature_frames(alone[:, speaker], len(samples))
            if len(chosen) < _MIN_FEATURES:
                chosen = _feature_frames(active[:, speaker], len(samples))
            enough = len(chosen) >= _MIN_FEATURES
            embedding = embed(fbank(samples, chosen)) if enough else np.zeros(192, np.float32)
            voices.append(Voice(activity[:, speaker].astype(np.float16), embedding, len(chosen) / 100))
    return voices


def hear_reference(samples: Samples) -> Floats:
    """The embedding of one person's voice, [192]; of what the segmentation takes for the main speaker."""
    voices = [voice for voice in hear(samples[:WINDOW]) if voice.clean_s]
    return max(voices, key=lambda voice: voice.clean_s).embedding if voices else np.zeros(192, np.float32)


def _feature_frames(active: Flags, num_samples: int) -> npt.NDArray[np.int64]:
    """The features (one in 10 ms) within these frames of the segmentation, at most _MAX_FEATURES."""
    num_features = max(0, (num_samples - _LENGTH) // _STEP + 1)
    frames = ((np.arange(num_features) * _STEP + _LENGTH // 2 - FIRST_FRAME) / FRAME).round().astype(np.int64)
    (chosen,) = np.nonzero(active[np.clip(frames, 0, len(active) - 1)])
    surplus = max(0, len(chosen) - _MAX_FEATURES) // 2
    return chosen[surplus : surplus + _MAX_FEATURES]


def embed(features: Floats) -> Floats:
    """[num_frames, 80] in, [192] of length 1 out."""
    features = features - features.mean(axis=0)
    num_positions = (len(features) + 1) // 2
    stretch = np.arange(num_positions) // _STRETCH
    spread = (stretch[:, None] == np.arange(stretch[-1] + 1)).astype(np.float32)
    pool = (spread / spread.sum(axis=0)).T + np.float32(1 / num_positions)
    (found,) = load(EMBEDDING).run(None, {"features": features[None], "pool": pool, "spread": spread})
    return np.asarray(found[0] / max(float(np.linalg.norm(found[0])), 1e-9), np.float32)


_FFT: Final = 512
_LENGTH, _STEP = 400, 160  # samples of a frame, and between two
_PREEMPHASIS: Final = 0.97


def fbank(samples: Samples, chosen: npt.NDArray[np.int64]) -> Floats:
    """[num_chosen, 80]: log mel energies of the chosen frames, as Kaldi computes them without dither."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, _LENGTH)[::_STEP][chosen]
    frames = frames - frames.mean(axis=1, keepdims=True)
    previous = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    window, mel = _window_and_mel()
    spectrum = np.fft.rfft((frames - np.float32(_PREEMPHASIS) * previous) * window, _FFT)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    # As a product this would wake BLAS's threads, which wait for a core where the engine has them all: 8 ms.
    energies = np.maximum(np.einsum("ij,jk->ik", power[:, : _FFT // 2], mel), np.finfo(np.float32).eps)
    return np.asarray(np.log(energies), np.float32)


@cache
def _window_and_mel() -> tuple[Floats, Floats]:
    window = np.hanning(_LENGTH) ** 0.85

    def mel(hz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(1127 * np.log(1 + hz / 700))

    low, high = mel(np.array([20.0, SAMPLE_RATE / 2]))
    edges = np.linspace(low, high, 82)
    bins = mel(np.arange(_FFT // 2) * SAMPLE_RATE / _FFT)[:, None]
    rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return window.astype(np.float32), np.maximum(0, np.minimum(rise, fall)).astype(np.float32)
