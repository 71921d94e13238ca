"""Sequences of spoken digits with known times, from the synthesised voices in the folder `data`."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
from rapidfuzz.distance import Levenshtein

from asr_server.core import SAMPLE_RATE, Samples

DATA = Path(__file__).parent / "data"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("f3", "m5", "linda", "rms")


class Spoken(NamedTuple):
    """Samples [num_samples] of float32 at 16 kHz, what is said in them, and where each digit lies."""

    samples: Samples
    digits: str
    times: list[tuple[float, float]]

    @property
    def text(self) -> str:
        return " ".join(WORDS[int(digit)] for digit in self.digits)


@cache
def digit(value: str, voice: str) -> Samples:
    start_s, end_s = json.loads((DATA / "digits.json").read_text())[voice][int(value)]
    samples, _ = soundfile.read(DATA / f"digits-{voice}.flac", dtype="float32")
    return np.asarray(samples[int(start_s * SAMPLE_RATE) : int(end_s * SAMPLE_RATE)], np.float32)


def say(digits: str, voice: str = "f3", gap_s: float | Iterable[float] = 0.25, lead_s: float = 0.3) -> Spoken:
    """The digits with `gap_s` of silence after each (one number, or one for each), `lead_s` before."""
    gaps = [gap_s] * len(digits) if isinstance(gap_s, float) else list(gap_s)
    parts, times = [silence(lead_s)], []
    at_s = len(parts[0]) / SAMPLE_RATE
    for value, pause_s in zip(digits, gaps, strict=True):
        speech = digit(value, voice)
        times.append((at_s, at_s + len(speech) / SAMPLE_RATE))
        parts += [speech, silence(pause_s)]
        at_s += (len(speech) + len(parts[-1])) / SAMPLE_RATE
    return Spoken(np.concatenate(parts), digits, times)


def silence(duration_s: float) -> Samples:
    return np.zeros(round(duration_s * SAMPLE_RATE), np.float32)


def digits_of(text: str) -> str:
    """The digits that a transcript names; other words become "?"."""
    return "".join(str(WORDS.index(word)) if word in WORDS else "?" for word in text.split())


def errors_in(heard: str, truth: str) -> int:
    """Digits wrong, missing or too many: the edit distance."""
    return Levenshtein.distance(heard, truth)
