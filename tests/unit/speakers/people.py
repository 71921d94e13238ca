"""Conversations of synthesised voices."""

from itertools import pairwise

import numpy as np

from asr_server.core import SAMPLE_RATE, Samples
from tests.support.speech import Spoken, say, silence


def join(said: list[Spoken], pause_s: float = 0.8) -> tuple[Samples, list[tuple[float, float]]]:
    """The samples, and where each part lies, in seconds."""
    parts = [part for each in said for part in (each.samples, silence(pause_s))]
    borders = np.cumsum([0, *(len(part) for part in parts)]) / SAMPLE_RATE
    return np.concatenate(parts), list(pairwise(borders.tolist()))[::2]


TALK: list[tuple[str, Spoken]] = [
    ("A", say("31415926", "f3")),
    ("B", say("27182818", "rms")),
    ("A", say("57721566", "f3")),
    ("B", say("14142135", "rms")),
]
