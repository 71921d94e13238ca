"""Clips of speech with their labels, and the files that hold them.

A clip is one stretch of 16 kHz mono sound by one voice: one digit, a run of digits said in one go,
or speech without any digit. Shards of clips are plain ``.npz`` files in the cache folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000
"""Hz, as Whisper hears."""

Samples = npt.NDArray[np.int16]
Wave = npt.NDArray[np.float32]

_FRAME = SAMPLE_RATE // 100
_SPEECH_BELOW_PEAK_DB = 35.0


@dataclass(frozen=True)
class Clip:
    """One stretch of sound.

    ``digits`` is what is said in it ("407", "" for none); ``voice`` reads "engine/name/style";
    speech lasts from sample ``start`` to sample ``end``.
    """

    samples: Samples
    digits: str
    voice: str
    start: int
    end: int

    @property
    def wave(self) -> Wave:
        """The samples as float32 within -1 to 1."""
        return np.asarray(self.samples, np.float32) / np.float32(32768)


def frame_levels_db(samples: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Level of each 10 ms frame in dB (of arbitrary reference); shape [frames]."""
    usable = len(samples) // _FRAME * _FRAME
    frames = samples[:usable].astype(np.float64).reshape(-1, _FRAME)
    return np.asarray(10 * np.log10((frames**2).mean(axis=1) + 1e-3))


def speech_bounds(samples: Samples) -> tuple[int, int] | None:
    """First and last sample of what is within 35 dB of the loudest frame, or None if there is nothing."""
    if len(samples) < 2 * _FRAME:
        return None
    levels = frame_levels_db(samples)
    if levels.max() < 20:  # an amplitude of 10 out of 32768: the synthesiser said nothing
        return None
    active = np.flatnonzero(levels > levels.max() - _SPEECH_BELOW_PEAK_DB)
    return int(active[0]) * _FRAME, (int(active[-1]) + 1) * _FRAME


def longest_pause_s(clip: Clip) -> float:
    """Longest quiet stretch inside the clip's speech, in seconds."""
    levels = frame_levels_db(clip.samples[clip.start : clip.end])
    if not len(levels):
        return 0.0
    active = np.flatnonzero(levels > levels.max() - _SPEECH_BELOW_PEAK_DB)
    return float(np.diff(active).max(initial=1) - 1) * 0.01


def make_clip(samples: Samples, digits: str, voice: str) -> Clip | None:
    """A clip cut to its speech with 20 ms of margin; None where the sound cannot be what the label says."""
    bounds = speech_bounds(samples)
    if bounds is None:
        return None
    first = max(0, bounds[0] - 320)
    last = min(len(samples), bounds[1] + 320)
    clip = Clip(samples[first:last], digits, voice, bounds[0] - first, bounds[1] - first)
    return clip if _is_plausible(clip) else None


def _is_plausible(clip: Clip) -> bool:
    speech_s = (clip.end - clip.start) / SAMPLE_RATE
    if not clip.digits:
        return speech_s > 0.1
    per_digit_s = speech_s / len(clip.digits)
    return 0.1 < per_digit_s < 1.3 and (len(clip.digits) == 1 or longest_pause_s(clip) < 0.5)


@dataclass
class ClipStore:
    """Clips held in memory, addressable by voice and by kind."""

    clips: list[Clip] = field(default_factory=list)

    def add(self, clip: Clip | None) -> None:
        """Append a clip; None is passed over."""
        if clip is not None:
            self.clips.append(clip)

    def save(self, path: Path) -> None:
        """Write all clips to one ``.npz`` file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(c.samples) for c in self.clips], dtype=np.int64)
        parts = [c.samples for c in self.clips] or [np.zeros(0, np.int16)]
        partial = path.with_suffix(".partial.npz")
        np.savez(
            partial,
            samples=np.concatenate(parts),
            lengths=lengths,
            bounds=np.array([(c.start, c.end) for c in self.clips], dtype=np.int64).reshape(-1, 2),
            digits=np.array([c.digits for c in self.clips], dtype=np.str_),
            voices=np.array([c.voice for c in self.clips], dtype=np.str_),
        )
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> ClipStore:
        """Read what ``save`` wrote; the clips are views of one array."""
        with np.load(path) as data:
            samples, ends = data["samples"], np.cumsum(data["lengths"])
            rows = zip(
                ends - data["lengths"], ends, data["bounds"], data["digits"], data["voices"], strict=True
            )
            return ClipStore(
                [
                    Clip(samples[first:last], str(digits), str(voice), int(bounds[0]), int(bounds[1]))
                    for first, last, bounds, digits, voice in rows
                ]
            )
