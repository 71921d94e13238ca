"""Sequences of digits put together from clips, and how wrong a reading of one is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .clips import SAMPLE_RATE, Clip, Wave
from .noises import Random
from .windows import Said


@dataclass(frozen=True)
class Example:
    """Sound of at most 30 s and what is said in it."""

    wave: Wave
    said: list[Said]

    @property
    def digits(self) -> str:
        """All digits in order."""
        return "".join(item.digits for item in self.said)


def sequence(clips: list[Clip], rng: Random, long_pauses: bool, max_digits: int = 12) -> Example:
    """Three to ``max_digits`` digits, 0.05 to 0.5 s apart; if asked, one pause in four is longer."""
    wanted = int(rng.integers(3, max_digits + 1))
    chosen = [clips[rng.integers(len(clips))] for _ in range(wanted)]
    parts, said, at = [np.zeros(int(rng.uniform(0.1, 0.5) * SAMPLE_RATE), np.float32)], [], 0
    at = len(parts[0])
    for clip in chosen:
        said.append(Said(clip.digits, (at + clip.start) / SAMPLE_RATE, (at + clip.end) / SAMPLE_RATE))
        long = long_pauses and rng.random() < 0.25
        pause_s = rng.uniform(0.8, 1.5) if long else rng.uniform(0.05, 0.5)
        parts += [clip.wave, np.zeros(int(pause_s * SAMPLE_RATE), np.float32)]
        at += len(parts[-2]) + len(parts[-1])
    return Example(np.concatenate(parts)[: 30 * SAMPLE_RATE], said)


def sequences(
    clips: Iterable[Clip], count: int, seed: int, long_pauses: bool = True, max_digits: int = 12
) -> list[Example]:
    """``count`` sequences, each by one of the voices that know all digits, in turn."""
    voices: dict[str, list[Clip]] = defaultdict(list)
    for clip in clips:
        if len(clip.digits) == 1:
            voices[clip.voice].append(clip)
    known = [takes for takes in voices.values() if len({clip.digits for clip in takes}) == 10]
    if not known:
        raise ValueError("no voice says all ten digits")
    rng = np.random.default_rng(seed)
    return [sequence(known[i % len(known)], rng, long_pauses, max_digits) for i in range(count)]


def digit_errors(reference: str, hypothesis: str) -> int:
    """Substitutions, insertions and deletions (Levenshtein)."""
    row = list(range(len(hypothesis) + 1))
    for i, wanted in enumerate(reference, 1):
        previous, row[0] = row[0], i
        for j, got in enumerate(hypothesis, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (wanted != got))
    return row[-1]
