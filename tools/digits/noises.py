"""Sounds without speech, and speech made unintelligible: what must come out as nothing.

Every function returns float32 samples at 16 kHz with a peak or level of about 0.1 to 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import fft, signal

from .clips import SAMPLE_RATE, Wave

Random = np.random.Generator
LEVEL = 0.1
"""RMS of steady noise."""


def coloured_noise(count: int, slope_db_per_octave: float, rng: Random) -> Wave:
    """Gaussian noise of RMS 0.1 whose spectrum falls by this slope (0 white, 3 pink, 6 brown)."""
    size = fft.next_fast_len(count, real=True)
    spectrum = fft.rfft(rng.standard_normal(size, dtype=np.float32))
    rise = np.maximum(np.arange(len(spectrum)), size * 50 / SAMPLE_RATE) ** (-slope_db_per_octave / 6.02)
    noise = fft.irfft(spectrum * rise.astype(np.float32), size)[:count]
    return np.asarray(noise * (LEVEL / (noise.std() + 1e-9)), np.float32)


def _times_s(count: int) -> Wave:
    return np.asarray(np.arange(count) / SAMPLE_RATE, np.float32)


def _fade(wave: Wave, seconds: float = 0.01) -> Wave:
    edge = min(len(wave) // 2, int(seconds * SAMPLE_RATE))
    if edge:
        ramp = np.linspace(0, 1, edge, dtype=np.float32)
        wave[:edge] *= ramp
        wave[-edge:] *= ramp[::-1]
    return wave


def tone(count: int, rng: Random) -> Wave:
    """One to three steady sines, sometimes switched on and off (dial, busy and beep tones)."""
    times = _times_s(count)
    wave = np.zeros(count, np.float32)
    for _ in range(rng.integers(1, 4)):
        wave += np.sin(2 * np.pi * np.exp(rng.uniform(np.log(60), np.log(6000))) * times + rng.uniform(0, 6))
    if rng.random() < 0.4:
        period_s = rng.uniform(0.1, 1.0)
        wave *= (times % period_s < period_s * rng.uniform(0.2, 0.8)).astype(np.float32)
    return _fade(wave * 0.3)


def chirp(count: int, rng: Random) -> Wave:
    """A sine gliding between two pitches, or warbling like a siren."""
    times = _times_s(count)
    low, high = np.sort(np.exp(rng.uniform(np.log(80), np.log(5000), 2)))
    if rng.random() < 0.5:
        pitch = np.geomspace(low, high, count)[:: rng.choice([-1, 1])]
    else:
        pitch = low + (high - low) * (0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(0.3, 6) * times))
    return _fade(np.asarray(0.4 * np.sin(2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE), np.float32))


def music(count: int, rng: Random) -> Wave:
    """Notes with harmonics that decay, one after another and together."""
    wave = np.zeros(count, np.float32)
    at = 0
    while at < count:
        length = min(count - at, int(rng.uniform(0.1, 0.8) * SAMPLE_RATE))
        times = _times_s(length)
        decay = np.exp(-times * rng.uniform(0.5, 8))
        for _ in range(rng.integers(1, 4)):
            pitch_hz = 55 * 2 ** (rng.integers(0, 48) / 12)
            for harmonic in range(1, rng.integers(2, 9)):
                wave[at : at + length] += decay * np.sin(2 * np.pi * pitch_hz * harmonic * times) / harmonic
        at += int(length * rng.uniform(0.3, 1.3)) + 1
    return _fade(wave * np.float32(0.4 / (np.abs(wave).max() + 1e-6)))


def clicks(count: int, rng: Random) -> Wave:
    """Knocks, clicks and keystrokes: short resonances."""
    wave = np.zeros(count, np.float32)
    for _ in range(rng.poisson(3 * count / SAMPLE_RATE) + 1):
        length = int(rng.uniform(0.003, 0.08) * SAMPLE_RATE)
        at = int(rng.integers(0, max(1, count - length)))
        times = _times_s(length)
        knock = np.exp(-times * rng.uniform(40, 400)) * np.sin(2 * np.pi * rng.uniform(100, 5000) * times)
        knock += 0.3 * np.exp(-times * 200) * rng.standard_normal(length)
        wave[at : at + length] += (rng.uniform(0.1, 1) * knock)[: count - at]
    return wave


def cough(count: int, rng: Random) -> Wave:
    """Coughs and puffs: bursts of noise through a few resonances, often followed by a hoarse voiced part."""
    wave = np.zeros(count, np.float32)
    for _ in range(rng.integers(1, 5)):
        length = int(rng.uniform(0.08, 0.5) * SAMPLE_RATE)
        at = int(rng.integers(0, max(1, count - length)))
        times = _times_s(length)
        source = rng.standard_normal(length)
        if rng.random() < 0.6:
            pitch = rng.uniform(90, 350) * (1 + 0.05 * rng.standard_normal())
            buzz = signal.sawtooth(
                2 * np.pi * pitch * times + 2 * np.cumsum(rng.standard_normal(length)) * 0.02
            )
            source += buzz * rng.uniform(0.5, 4) * np.clip((times - rng.uniform(0, 0.1)) * 20, 0, 1)
        for _ in range(rng.integers(1, 4)):
            source = source + _resonate(source, rng.uniform(300, 4000), rng.uniform(80, 600))
        envelope = np.minimum(times / rng.uniform(0.003, 0.05), 1) * np.exp(-times * rng.uniform(3, 25))
        burst = source * envelope
        wave[at : at + length] += (burst / (np.abs(burst).max() + 1e-6) * rng.uniform(0.3, 1))[: count - at]
    return wave


def _resonate(source: npt.NDArray[np.float64], centre_hz: float, width_hz: float) -> npt.NDArray[np.float64]:
    radius = np.exp(-np.pi * width_hz / SAMPLE_RATE)
    angle = 2 * np.pi * centre_hz / SAMPLE_RATE
    filtered: npt.NDArray[np.float64] = signal.lfilter(
        [1 - radius], [1, -2 * radius * np.cos(angle), radius**2], source
    )
    return np.asarray(filtered * (source.std() / (filtered.std() + 1e-9)))


def breath(count: int, rng: Random) -> Wave:
    """Breathing, wind and rustling: noise that swells and fades."""
    knots = rng.random(max(3, count // 4000)) ** 3
    swell = np.interp(np.arange(count), np.linspace(0, count, len(knots)), knots)
    wave = coloured_noise(count, rng.uniform(0, 6), rng) * swell
    return np.asarray(wave / (np.abs(wave).max() + 1e-6) * 0.5, np.float32)


def call(count: int, rng: Random) -> Wave:
    """Barks, yelps, mews and crows: buzzing that glides in pitch through resonances, once or a few times."""
    wave = np.zeros(count, np.float32)
    low_hz, high_hz = np.sort(np.exp(rng.uniform(np.log(120), np.log(1200), 2)))
    centres_hz, widths_hz = rng.uniform(300, 4000, 3), rng.uniform(60, 500, 3)
    length = min(count, int(rng.uniform(0.08, 0.7) * SAMPLE_RATE))
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, count - length + 1))
        arch = np.sin(np.linspace(rng.uniform(0, 1), rng.uniform(1.5, 3.1), length))
        pitch_hz = low_hz + (high_hz - low_hz) * arch
        source = signal.sawtooth(2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE)
        source = source + rng.uniform(0, 0.6) * rng.standard_normal(length)
        for centre_hz, width_hz in zip(centres_hz, widths_hz, strict=True):
            source = source + _resonate(source, centre_hz, width_hz)
        sound = source * np.sin(np.linspace(0.05, np.pi, length)) ** rng.uniform(0.3, 2)
        wave[at : at + length] += sound / (np.abs(sound).max() + 1e-6) * rng.uniform(0.3, 1)
    return wave


def hum(count: int, rng: Random) -> Wave:
    """Mains hum and engines: harmonics of a low tone with a little noise."""
    times = _times_s(count)
    base_hz = rng.choice([50.0, 60.0, rng.uniform(30, 200)])
    wave = sum(rng.random() / k * np.sin(2 * np.pi * base_hz * k * times + k) for k in range(1, 12))
    return np.asarray(0.2 * wave, np.float32) + coloured_noise(count, 4.0, rng) * np.float32(
        rng.random() * 0.3
    )


def stationary(count: int, rng: Random) -> Wave:
    """Steady noise of any colour."""
    return coloured_noise(count, rng.uniform(-2, 7), rng)


MAKERS = (stationary, stationary, tone, chirp, music, clicks, cough, cough, cough, call, call, breath, hum)


def any_noise(count: int, rng: Random) -> Wave:
    """One of the above; sometimes two together."""
    wave = MAKERS[rng.integers(len(MAKERS))](count, rng)
    if rng.random() < 0.2:
        wave = wave + MAKERS[rng.integers(len(MAKERS))](count, rng) * np.float32(rng.random())
    return wave


def shuffled(wave: Wave, rng: Random) -> Wave:
    """Speech played backwards, or cut into pieces of 40 to 120 ms and put together in another order."""
    if rng.random() < 0.5:
        return wave[::-1].copy()
    piece = int(rng.uniform(0.04, 0.12) * SAMPLE_RATE)
    pieces = [_fade(wave[at : at + piece].copy(), 0.003) for at in range(0, len(wave), piece)]
    if rng.random() < 0.5:
        pieces = [p[::-1] for p in pieces]
    return np.concatenate([pieces[i] for i in rng.permutation(len(pieces))]) if pieces else wave
