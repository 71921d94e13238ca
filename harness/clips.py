"""Distinct clips of sound that no cache can answer from: tones, sweeps and pauses in noise."""

import numpy as np

from asr_server.core import SAMPLE_RATE, Samples


def make_clip(seed: int, duration_s: float) -> Samples:
    """The same samples for the same seed, and others for any other."""
    random = np.random.default_rng(seed)
    parts = []
    missing = round(duration_s * SAMPLE_RATE)
    while missing > 0:
        part = _tone(random)[:missing]
        parts.append(part)
        missing -= len(part)
    samples = np.concatenate(parts)
    return (samples + 0.01 * random.standard_normal(len(samples))).astype(np.float32)


def _tone(random: np.random.Generator) -> Samples:
    time_s = np.arange(round(random.uniform(0.1, 0.8) * SAMPLE_RATE)) / SAMPLE_RATE
    loudness = random.uniform(0.05, 0.5) * (random.random() < 0.8)
    phase = 2 * np.pi * random.uniform(100, 3000) * time_s * (1 + random.uniform(-0.3, 0.3) * time_s)
    tone: Samples = (loudness * np.sin(phase)).astype(np.float32)
    return tone
