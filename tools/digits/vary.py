"""More speakers out of few: pitch, vocal tract, tempo and breath moved independently with the WORLD vocoder.

Morise, Yokomori, Ozawa: WORLD, a vocoder-based high-quality speech synthesis system (2016), through pyworld.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyworld

from .clips import SAMPLE_RATE, Clip, Samples
from .noises import Random

Floats = npt.NDArray[np.float64]

FRAME_MS = 5.0


@dataclass(frozen=True)
class Manner:
    """How a copy differs: factors of pitch, formants, tempo and pitch movement; tilt and breath.

    The first formant (about 1 kHz and below) and the ones above move by factors of their own.
    """

    pitch: float
    low_formants: float
    high_formants: float
    tempo: float
    liveliness: float
    tilt_db_per_octave: float
    breath: float

    def __str__(self) -> str:
        return f"{self.pitch:.2f}-{self.low_formants:.2f}-{self.high_formants:.2f}-{self.tempo:.2f}"


def random_manner(rng: Random, pitch_octaves: tuple[float, float] = (-0.7, 1.0)) -> Manner:
    """From a bass to a child: at a higher pitch the throat is mostly shorter."""
    octaves = rng.uniform(*pitch_octaves)
    formants = np.clip(rng.normal(octaves * 0.12, 0.09), -0.25, 0.3)
    return Manner(
        pitch=float(2**octaves),
        low_formants=float(np.exp(formants + rng.normal(0, 0.05))),
        high_formants=float(np.exp(formants)),
        tempo=float(np.exp(rng.uniform(-0.45, 0.4))),
        liveliness=float(rng.uniform(0.2, 1.7)),
        tilt_db_per_octave=float(rng.normal(0, 1.5)),
        breath=float(max(0.0, rng.uniform(-0.5, 0.5))),
    )


@dataclass(frozen=True)
class Analysis:
    """WORLD's parameters in steps of 5 ms: f0 [frames], spectral envelope and aperiodicity [frames, bins]."""

    f0: Floats
    envelope: Floats
    aperiodicity: Floats

    def at(self, places: Floats) -> Analysis:
        """The speech at these places (frame numbers with fractions): its time bent."""
        lower = np.clip(places.astype(np.int64), 0, max(0, len(self.f0) - 2))
        share = np.clip(places - lower, 0, 1)[:, None]
        upper = np.minimum(lower + 1, len(self.f0) - 1)
        envelope = self.envelope[lower] ** (1 - share) * self.envelope[upper] ** share
        aperiodicity = self.aperiodicity[lower] * (1 - share) + self.aperiodicity[upper] * share
        return Analysis(self.f0[np.where(share[:, 0] < 0.5, lower, upper)], envelope, aperiodicity)


def analyse(samples: Samples) -> Analysis:
    """Take speech apart."""
    wave = samples.astype(np.float64) / 32768
    wave += np.random.default_rng(0).standard_normal(len(wave)) * 1e-5  # exact zeros make cheaptrick fail
    f0, times = pyworld.dio(wave, SAMPLE_RATE, f0_floor=60, f0_ceil=420)
    f0 = pyworld.stonemask(wave, f0, times, SAMPLE_RATE)
    envelope = pyworld.cheaptrick(wave, f0, times, SAMPLE_RATE)
    return Analysis(f0, envelope, pyworld.d4c(wave, f0, times, SAMPLE_RATE))


def _warp(spectra: Floats, manner: Manner) -> Floats:
    """Move what lies at 1 kHz by the lower factor, at 2.5 kHz and above by the higher one."""
    places_hz = np.linspace(0, SAMPLE_RATE / 2, spectra.shape[1])
    knots_hz = np.array([0, 1000, 2500, 2 * SAMPLE_RATE], np.float64)
    moved_hz = knots_hz * [1, manner.low_formants, manner.high_formants, manner.high_formants]
    source = np.interp(places_hz, moved_hz, knots_hz) / places_hz[1]
    lower = np.minimum(source.astype(np.int64), spectra.shape[1] - 2)
    share = np.minimum(source - lower, 1)
    return np.ascontiguousarray(spectra[:, lower] * (1 - share) + spectra[:, lower + 1] * share)


def _tilt(num_bins: int, db_per_octave: float) -> Floats:
    """Gains (of power) that are 1 up to 500 Hz and rise or fall above; shape [bins]."""
    octaves = np.log2(np.maximum(np.linspace(0, SAMPLE_RATE / 2, num_bins), 500) / 500)
    return np.asarray(10 ** (db_per_octave * octaves / 10))


def _new_pitch(f0: Floats, manner: Manner) -> Floats:
    voiced = f0 > 0
    if not voiced.any():
        return f0
    mean = np.exp(np.log(f0[voiced]).mean())
    moved = np.where(voiced, mean * manner.pitch * (np.maximum(f0, 1) / mean) ** manner.liveliness, 0)
    return np.where(voiced, np.clip(moved, 50, 500), 0)


def _course(num_frames: int, tempo: float, rng: Random) -> Floats:
    """Where each new frame comes from: the tempo changes by half or so within a word."""
    durations = np.exp(rng.normal(0, 0.3, 5))
    ends = np.concatenate([[0], np.cumsum(durations)]) / durations.sum()
    new = np.linspace(0, 1, max(2, round(num_frames / tempo)))
    return np.asarray(np.interp(new, ends, np.linspace(0, num_frames - 1, len(ends))))


def speak(parts: Analysis, manner: Manner, rng: Random) -> Samples:
    """Put speech together again in another manner."""
    bent = parts.at(_course(len(parts.f0), manner.tempo, rng))
    envelope = _warp(bent.envelope, manner) * _tilt(bent.envelope.shape[1], manner.tilt_db_per_octave)
    aperiodicity = 1 - (1 - _warp(bent.aperiodicity, manner)) * (1 - manner.breath)
    wave = pyworld.synthesize(_new_pitch(bent.f0, manner), envelope, aperiodicity, SAMPLE_RATE, FRAME_MS)
    peak = np.abs(wave).max() + 1e-9
    return np.asarray(wave / max(1.0, peak) * 32767, np.int16)


def varied(clip: Clip, parts: Analysis, manner: Manner, rng: Random) -> tuple[Samples, str]:
    """The clip in another manner, and the name of the voice that results."""
    engine, name, style = clip.voice.split("/")
    return speak(parts, manner, rng), f"{engine}-varied/{name}/{style}+{manner}"
