"""What happens to sound between a mouth and a server: filters, rooms, noise, codecs, levels."""

from __future__ import annotations

import io

import numpy as np
import soundfile
import soxr
from scipy import fft

from .clips import SAMPLE_RATE, Wave
from .noises import Random


def resample(wave: Wave, ratio: float) -> Wave:
    """Play ``ratio`` times as fast: pitch, formants and tempo move together. Linear will do."""
    count = int(len(wave) / ratio)
    return np.asarray(np.interp(np.arange(count) * ratio, np.arange(len(wave)), wave), np.float32)


def _edge(frequencies_hz: Wave, cutoff_hz: float, octave_width: float, high_pass: bool) -> Wave:
    octaves = np.log2(np.maximum(frequencies_hz, 1.0) / cutoff_hz) * (1 if high_pass else -1)
    return np.asarray(1 / (1 + np.exp(np.clip(-octaves * 6 / octave_width, -60, 60))), np.float32)


def _band(frequencies_hz: Wave, rng: Random) -> Wave:
    """A random band: telephone, 8 kHz recording, or anything between narrow and whole; shape [bins]."""
    kind = rng.random()
    low_hz, high_hz = rng.uniform(20, 250), rng.uniform(3000, 8000)
    if kind < 0.2:
        low_hz, high_hz = rng.uniform(200, 400), rng.uniform(3000, 3600)
    elif kind < 0.6:
        low_hz, high_hz = rng.uniform(20, 120), rng.uniform(3600, 4000)
    low = _edge(frequencies_hz, low_hz, rng.uniform(0.3, 1.5), high_pass=True)
    return low * _edge(frequencies_hz, high_hz, rng.uniform(0.05, 0.4), high_pass=False)


def _equaliser(frequencies_hz: Wave, rng: Random) -> Wave:
    """A smooth random curve of some dB, as microphones have; shape [bins]."""
    knots_hz = np.geomspace(50, 8000, 8)
    gains_db = rng.normal(0, rng.uniform(0, 6), len(knots_hz))
    curve_db = np.interp(np.log(np.maximum(frequencies_hz, 50)), np.log(knots_hz), gains_db)
    return np.asarray(10 ** (curve_db / 20), np.float32)


def _room(size: int, rng: Random) -> np.ndarray[tuple[int], np.dtype[np.complex64]]:
    """Spectrum of a synthetic impulse response: direct sound, a few echoes, a decaying tail; shape [bins]."""
    decay_s = rng.uniform(0.05, 0.5)
    length = int(decay_s * SAMPLE_RATE)
    tail = rng.standard_normal(length, dtype=np.float32) * np.exp(-6.9 * np.arange(length) / length)
    response = tail.astype(np.float32) * np.float32(10 ** rng.uniform(-2.2, -0.7) / np.sqrt(decay_s * 10))
    response[0] = 1.0
    for _ in range(rng.integers(0, 5)):
        response[rng.integers(1, min(length, 800))] += rng.uniform(-0.4, 0.4)
    spectrum: np.ndarray[tuple[int], np.dtype[np.complex64]] = fft.rfft(response, size)
    return spectrum


def transmit(wave: Wave, rng: Random, probability: float = 0.75) -> Wave:
    """Band, microphone and room, each with some probability, in one pass through the spectrum."""
    if rng.random() > probability:
        return wave
    size = fft.next_fast_len(len(wave) + SAMPLE_RATE // 2, real=True)
    frequencies_hz = fft.rfftfreq(size, 1 / SAMPLE_RATE).astype(np.float32)
    spectrum = fft.rfft(wave, size)
    if rng.random() < 0.6:
        spectrum *= _band(frequencies_hz, rng)
    if rng.random() < 0.6:
        spectrum *= _equaliser(frequencies_hz, rng)
    if rng.random() < 0.4:
        spectrum *= _room(size, rng)
    return np.asarray(fft.irfft(spectrum, size)[: len(wave)], np.float32)


def mu_law(wave: Wave, levels: int = 255) -> Wave:
    """Eight bits by the telephone's logarithmic scale, and back."""
    squeezed = np.sign(wave) * np.log1p(levels * np.minimum(np.abs(wave), 1)) / np.log1p(levels)
    rounded = np.round(squeezed * 127) / 127
    return np.asarray(np.sign(rounded) * np.expm1(np.abs(rounded) * np.log1p(levels)) / levels, np.float32)


def mobile(wave: Wave) -> Wave:
    """Through a mobile telephone: 8 kHz and GSM's full-rate codec, and back."""
    file = io.BytesIO()
    narrow = soxr.resample(wave, SAMPLE_RATE, 8000)
    soundfile.write(file, np.clip(narrow, -1, 1), 8000, format="WAV", subtype="GSM610")
    coded, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    wide = soxr.resample(coded, 8000, SAMPLE_RATE)
    return np.asarray(np.resize(np.pad(wide, (0, max(0, len(wave) - len(wide)))), len(wave)), np.float32)


def set_level(wave: Wave, rng: Random) -> Wave:
    """A random peak between -30 and 0 dB of full scale; one in twenty clips a little."""
    peak = float(np.abs(wave).max())
    if peak < 1e-5:
        return wave
    wave = wave * np.float32(10 ** (rng.uniform(-30, 0) / 20) / peak)
    if rng.random() < 0.05:
        top = np.abs(wave).max() * rng.uniform(0.4, 0.9)
        wave = np.clip(wave, -top, top)
    return mu_law(wave) if rng.random() < 0.1 else wave
