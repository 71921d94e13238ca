"""Conversations of people who can be told apart, and the models for it, or a skip where they are not here."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.errors import CheckpointError
from asr_server.speakers.models import fetch_speaker_models
from tests.speech import Spoken, say, silence


@cache
def _why_missing() -> str:
    try:
        fetch_speaker_models()
    except CheckpointError as error:
        return str(error)
    return ""


def require_models() -> None:
    if why := _why_missing():
        pytest.skip(why)


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
