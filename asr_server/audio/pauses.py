"""Where nothing is to be heard within a chunk, however short."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asr_server.audio.split import HOP, HOPS_PER_LEVEL, SILENCE_POWER, powers
from asr_server.core import SAMPLE_RATE, Samples

MIN_PAUSE_HOPS = 6  # 30 ms
BELOW_LOUDEST = 10**-4.5  # in power, 45 dB: the faintest consonants lie some 35 dB below the loudest vowels

Pauses = npt.NDArray[np.floating]  # [count, 2]: start and end in seconds, in order


def find_pauses(samples: Samples) -> Pauses:
    """Stretches in which every 20 ms are quiet."""
    levels = powers(samples)
    if not len(levels):
        return np.empty((0, 2))
    quiet = levels < max(SILENCE_POWER, BELOW_LOUDEST * float(levels.max()))
    pauses = np.flatnonzero(np.diff(quiet, prepend=False, append=False)).reshape(-1, 2)
    pauses[:, 1] = np.minimum(pauses[:, 1] + HOPS_PER_LEVEL - 1, len(levels))  # a level is of what follows
    return pauses[pauses[:, 1] - pauses[:, 0] >= MIN_PAUSE_HOPS] * (HOP / SAMPLE_RATE)
