"""Training windows: digits by one voice with random gaps, among noises, and where in them each is said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import channel, noises
from .clips import SAMPLE_RATE, Wave
from .noises import Random
from .voice_pool import VoicePool

SEGMENT_PAUSE_S = 0.6
"""A pause of this length ends a segment."""


@dataclass(frozen=True)
class Said:
    """A stretch of digits within a window, in seconds from the window's start."""

    digits: str
    start_s: float
    end_s: float


@dataclass
class Window:
    """Sound of one window and what is said in it."""

    wave: Wave
    said: list[Said]


@dataclass(frozen=True)
class Shape:
    """Length of a window's sound, most digits in it, and the length it is padded to with exact zeros."""

    sound_s: float
    max_digits: int
    padded_s: float


def segments(said: list[Said]) -> list[Said]:
    """Join what is less than 0.6 s apart."""
    joined: list[Said] = []
    for item in said:
        if joined and item.start_s - joined[-1].end_s < SEGMENT_PAUSE_S:
            last = joined[-1]
            joined[-1] = Said(last.digits + item.digits, last.start_s, max(last.end_s, item.end_s))
        else:
            joined.append(item)
    return joined


def _normalised(wave: Wave) -> Wave:
    return np.asarray(wave / (np.sqrt((wave**2).mean()) + 1e-6) * 0.1, np.float32)


def _gap_s(rng: Random) -> float:
    kind = rng.random()
    if kind < 0.15:
        return rng.uniform(-0.04, 0.03)
    if kind < 0.6:
        return rng.uniform(0.03, 0.3)
    if kind < 0.78:
        return rng.uniform(0.3, 0.55)
    return rng.uniform(0.62, 1.6)


def _swing_db(rng: Random) -> float:
    """How far the digits' levels stray from the mean: mostly little, in four windows of ten up to 13 dB."""
    return float(rng.uniform(4, 13)) if rng.random() < 0.4 else float(rng.uniform(0, 4))


def _gain(swing_db: float, rng: Random) -> np.float32:
    """Anything between, or one time in three one of the extremes."""
    stray = rng.uniform(-1, 1)
    return np.float32(10 ** (swing_db * (np.sign(stray) if rng.random() < 0.33 else stray) / 20))


def digits_window(pool: VoicePool, shape: Shape, rng: Random) -> Window:
    """Digits by one voice (now and then by two) up to the window's end or its number of digits."""
    wave = np.zeros(int(shape.sound_s * SAMPLE_RATE), np.float32)
    voice, ratio = pool.voice(rng), float(np.exp(rng.uniform(np.log(0.8), np.log(1.25))))
    said: list[Said] = []
    wanted = shape.max_digits if rng.random() < 0.4 else int(rng.integers(1, shape.max_digits + 1))
    swing_db = _swing_db(rng)
    at_s = rng.uniform(0, 0.3) if rng.random() < 0.5 else rng.uniform(0, shape.sound_s * 0.5)
    while wanted > 0:
        if rng.random() < 0.03:
            voice = pool.voice(rng)
        clip = voice.next_clip(wanted, rng)
        sound = channel.resample(clip.wave, ratio * rng.uniform(0.96, 1.04))
        scale = len(sound) / len(clip.samples) / SAMPLE_RATE
        first = round((at_s - clip.start * scale) * SAMPLE_RATE)
        if first < 0:
            sound, first = sound[-first:], 0
        if first + len(sound) > len(wave):
            break
        wave[first : first + len(sound)] += _normalised(sound) * _gain(swing_db, rng)
        end_s = at_s + (clip.end - clip.start) * scale
        said.append(Said(clip.digits, at_s, end_s))
        wanted -= len(clip.digits)
        at_s = end_s + _gap_s(rng)
    if rng.random() < 0.15:
        _intrude(wave, said, pool, rng)
    return Window(wave, said)


def _intrude(wave: Wave, said: list[Said], pool: VoicePool, rng: Random) -> None:
    """A noise, or speech without digits, where nobody says a digit."""
    edges = [0.0, *(t for s in said for t in (s.start_s, s.end_s)), len(wave) / SAMPLE_RATE]
    pauses = [(a + 0.05, b - 0.05) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > 0.35]
    if not pauses:
        return
    start_s, end_s = pauses[rng.integers(len(pauses))]
    count = int((end_s - start_s) * SAMPLE_RATE)
    if rng.random() < 0.6:
        sound = noises.any_noise(min(count, int(rng.uniform(0.2, 2.0) * SAMPLE_RATE)), rng)
    else:
        sound = pool.other(rng).wave[:count]
    at = int(start_s * SAMPLE_RATE) + int(rng.integers(0, count - len(sound) + 1))
    wave[at : at + len(sound)] += _normalised(sound) * np.float32(10 ** (rng.uniform(-20, 2) / 20))


def nothing_window(pool: VoicePool, shape: Shape, rng: Random) -> Window:
    """No digits: silence, noises, speech of other words, digits made unintelligible."""
    count = int(shape.sound_s * SAMPLE_RATE)
    wave, kind = np.zeros(count, np.float32), rng.random()
    if kind < 0.05:
        return Window(wave, [])
    if kind < 0.4:
        sound = noises.any_noise(count if rng.random() < 0.6 else int(count * rng.uniform(0.1, 1)), rng)
        at = int(rng.integers(0, count - len(sound) + 1))
        wave[at : at + len(sound)] = sound
        return Window(wave, [])
    at, ratio = int(rng.uniform(0, 0.4) * count), float(np.exp(rng.uniform(np.log(0.8), np.log(1.25))))
    while at < count:
        if kind < 0.85:
            sound = pool.other(rng).wave
        else:
            sound = noises.shuffled(pool.voice(rng).next_clip(9, rng).wave, rng)
        sound = _normalised(channel.resample(sound, ratio))[: count - at]
        wave[at : at + len(sound)] += sound
        at += len(sound) + int(rng.uniform(0.0, 1.0) * SAMPLE_RATE)
    return Window(wave, [])


def spoil(window: Window, pool: VoicePool, severity: float, rng: Random) -> Window:
    """Channel, background noise at 0 to 40 dB (or none), level; clean but for the level with 1 - severity."""
    if rng.random() > severity:
        return Window(channel.set_level(window.wave, rng), window.said)
    wave = channel.transmit(window.wave, rng)
    speech = float(np.sqrt((wave**2).mean() / max(0.1, (np.abs(wave) > 1e-4).mean())))
    kind = rng.random()
    if kind < 0.55:
        noise = noises.stationary(len(wave), rng) if kind < 0.4 else _babble(len(wave), pool, rng)
        ratio_db = rng.triangular(0, 12, 40) if kind < 0.4 else rng.uniform(8, 40)
        wave = wave + noise * np.float32(max(speech, 1e-3) * 10 * 10 ** (-ratio_db / 20))
    wave = channel.set_level(wave, rng)
    return Window(channel.mobile(wave) if rng.random() < 0.06 else wave, window.said)


def _babble(count: int, pool: VoicePool, rng: Random) -> Wave:
    """Three to six people talking at once, RMS 0.1."""
    wave = np.zeros(count, np.float32)
    for _ in range(rng.integers(3, 7)):
        talk = np.concatenate([pool.other(rng).wave for _ in range(1 + count // (4 * SAMPLE_RATE))])
        wave += np.resize(np.roll(_normalised(talk), int(rng.integers(len(talk)))), count)
    return _normalised(wave)
