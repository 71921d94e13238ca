"""Spoken digits, for the embedded model; where the recordings of people lie, and what is heard of them."""

import numpy as np

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import RECORDINGS
from harness.speech.digits import VOICES, WORDS, Spoken, digit, digits_of, errors_in, say, silence

__all__ = [
    "RECORDINGS",
    "VOICES",
    "WORDS",
    "Spoken",
    "audible",
    "digit",
    "digits_of",
    "errors_in",
    "say",
    "silence",
]


def audible(samples: Samples) -> tuple[int, int]:
    """The first and the last sample within 25 dB of the loudest 5 ms, which hiss and breath are not."""
    hop = SAMPLE_RATE // 200
    powers = (samples[: len(samples) // hop * hop].reshape(-1, hop) ** 2).mean(1)
    loud = np.flatnonzero(powers > powers.max() * 10**-2.5)
    return int(loud[0]) * hop, (int(loud[-1]) + 1) * hop
