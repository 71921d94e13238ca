"""Word errors by Whisper's normaliser, and errors of words' times. Used by `accuracy.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rapidfuzz.distance import Levenshtein
from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer

Normaliser = Callable[[str], str]
with warnings.catch_warnings():  # it leaves its list of spellings to the garbage collector
    warnings.simplefilter("ignore", ResourceWarning)
    NORMALISERS: dict[str, Normaliser] = {
        "english": EnglishTextNormalizer(),  # also numbers in digits: "three one four" is one word, 314
        "basic": BasicTextNormalizer(),
    }


class TimedWord(NamedTuple):
    text: str
    start_s: float
    end_s: float


@dataclass
class Score:
    """Of one file, or of many added up."""

    num_words: int = 0  # of the truth
    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    # Of words heard right, the larger of a word's two.
    time_errors_s: list[float] = field(default_factory=list)

    @property
    def error_rate(self) -> float:
        return (self.substitutions + self.insertions + self.deletions) / max(1, self.num_words)

    def __add__(self, other: Score) -> Score:
        return Score(
            self.num_words + other.num_words,
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.time_errors_s + other.time_errors_s,
        )


def word_errors(truth: str, heard: str, normalise: Normaliser) -> Score:
    expected, found = normalise(truth).split(), normalise(heard).split()
    tags = [operation.tag for operation in Levenshtein.editops(expected, found)]
    return Score(len(expected), tags.count("replace"), tags.count("insert"), tags.count("delete"))


def time_errors_s(truth: Sequence[TimedWord], heard: Sequence[TimedWord]) -> list[float]:
    """For each word that was heard as what it is: how far off its start or its end is, whichever is more."""
    operations = Levenshtein.opcodes([_plain(word) for word in truth], [_plain(word) for word in heard])
    pairs = [
        pair
        for each in operations
        if each.tag == "equal"
        for pair in zip(
            truth[each.src_start : each.src_end], heard[each.dest_start : each.dest_end], strict=True
        )
    ]
    return [max(abs(a.start_s - b.start_s), abs(a.end_s - b.end_s)) for a, b in pairs]


def _plain(word: TimedWord) -> str:
    return "".join(NORMALISERS["basic"](word.text).split())
