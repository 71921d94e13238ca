"""More speakers out of few: pitch, vocal tract and tempo moved independently with the WORLD vocoder.

Morise, Yokomori, Ozawa: WORLD, a vocoder-based high-quality speech synthesis system (2016), through pyworld.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyworld

from .clips import SAMPLE_RATE, Clip, Samples

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Manner:
    """How a copy differs: factors of pitch, of formant frequencies, of tempo, and of pitch movement."""

    pitch: float
    formants: float
    tempo: float
    liveliness: float

    def __str__(self) -> str:
        return f"{self.pitch:.2f}-{self.formants:.2f}-{self.tempo:.2f}"


def random_manner(rng: np.random.Generator) -> Manner:
    """Pitch by up to an octave, formants by up to a fifth, with a shorter throat mostly at a higher pitch."""
    octaves = rng.uniform(-0.7, 1.0)
    formants = np.exp(np.clip(rng.normal(octaves * 0.08, 0.09), -0.2, 0.22))
    return Manner(
        float(2**octaves),
        float(formants),
        float(np.exp(rng.uniform(-0.3, 0.3))),
        float(rng.uniform(0.3, 1.6)),
    )


@dataclass(frozen=True)
class Analysis:
    """WORLD's parameters in steps of 5 ms: f0 [frames], spectral envelope and aperiodicity [frames, bins]."""

    f0: Floats
    envelope: Floats
    aperiodicity: Floats


def analyse(samples: Samples) -> Analysis:
    """Take speech apart."""
    wave = samples.astype(np.float64) / 32768
    wave += np.random.default_rng(0).standard_normal(len(wave)) * 1e-5  # exact zeros make cheaptrick fail
    f0, times = pyworld.dio(wave, SAMPLE_RATE, f0_floor=60, f0_ceil=420)
    f0 = pyworld.stonemask(wave, f0, times, SAMPLE_RATE)
    envelope = pyworld.cheaptrick(wave, f0, times, SAMPLE_RATE)
    return Analysis(f0, envelope, pyworld.d4c(wave, f0, times, SAMPLE_RATE))


def _warp(spectra: Floats, factor: float) -> Floats:
    bins = np.arange(spectra.shape[1])
    source = np.clip(bins / factor, 0, spectra.shape[1] - 1)
    lower = np.minimum(source.astype(np.int64), spectra.shape[1] - 2)
    share = source - lower
    return np.ascontiguousarray(spectra[:, lower] * (1 - share) + spectra[:, lower + 1] * share)


def _new_pitch(f0: Floats, manner: Manner) -> Floats:
    voiced = f0 > 0
    if not voiced.any():
        return f0
    mean = np.exp(np.log(f0[voiced]).mean())
    moved = np.where(voiced, mean * manner.pitch * (np.maximum(f0, 1) / mean) ** manner.liveliness, 0)
    return np.where(voiced, np.clip(moved, 55, 500), 0)


def speak(parts: Analysis, manner: Manner) -> Samples:
    """Put speech together again in another manner."""
    wave = pyworld.synthesize(
        _new_pitch(parts.f0, manner),
        _warp(parts.envelope, manner.formants),
        _warp(parts.aperiodicity, manner.formants),
        SAMPLE_RATE,
        5.0 / manner.tempo,
    )
    peak = np.abs(wave).max() + 1e-9
    return np.asarray(wave / max(1.0, peak) * 32767, np.int16)


def varied(clip: Clip, parts: Analysis, manner: Manner) -> tuple[Samples, str]:
    """The clip in another manner, and the name of the voice that results."""
    engine, name, style = clip.voice.split("/")
    return speak(parts, manner), f"{engine}-varied/{name}/{style}+{manner}"
