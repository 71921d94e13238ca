"""Counts what was heard wrong: words, or characters in languages that write none apart, and words' times.

Texts are compared as Whisper's authors compare them (Radford et al. 2022, appendix C): English by their own
normaliser, with numbers as words rather than as figures, so that each word of a number counts; the rest in
lower case and without punctuation.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from rapidfuzz.distance import Levenshtein

UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})
_APOSTROPHES = str.maketrans("’‘ʼ`", "''''")
_HINDI = ["शून्य", "एक", "दो", "तीन", "चार", "पांच", "छह", "सात", "आठ", "नौ", "दस"]
_SAME = {"nl": {"één": "een"}, "hi": {"पाँच": "पांच", "छः": "छह"}}  # two spellings of one word


class TimedWord(NamedTuple):
    text: str
    start_s: float
    end_s: float


@dataclass
class Score:
    """The errors in one text, or in many added up."""

    num_words: int = 0  # of the truth; characters in languages without spaces
    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    # Of words heard right, the larger of a word's two.
    time_errors_s: list[float] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def error_rate(self) -> float:
        return self.errors / max(1, self.num_words)

    def __add__(self, other: Score) -> Score:
        return Score(
            self.num_words + other.num_words,
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.time_errors_s + other.time_errors_s,
        )


def total(scores: Iterable[Score]) -> Score:
    return sum(scores, Score())


def normalise(text: str, language: str = "en") -> list[str]:
    """The words to compare (characters where the language writes no spaces), spelt one way."""
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    text = re.sub(r"(?<=\d)[.,](?=\d{3}\b)", "", text) if language not in UNSPACED else text
    text = re.sub(r"\d+", lambda number: f" {_number_in_words(number[0], language)} ", text)
    if language == "en":
        words = str(_english()(text)).replace("-", " ").split()
    else:
        letters = "".join(
            character if unicodedata.category(character)[0] in "LM" else " " for character in text.lower()
        )
        words = letters.split()
    if language in UNSPACED:
        return list("".join(words))
    same = _SAME.get(language, {})
    return [same.get(word, word) for word in words]


def word_errors(truth: str, heard: str, language: str = "en") -> Score:
    """Compares two texts by the least number of words substituted, inserted and deleted."""
    expected, found = normalise(truth, language), normalise(heard, language)
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
    return "".join(c for c in word.text.lower() if unicodedata.category(c)[0] in "LMN")


def _number_in_words(digits: str, language: str) -> str:
    from num2words import num2words

    if language == "hi":
        return _HINDI[int(digits)] if int(digits) < len(_HINDI) else digits
    if language in UNSPACED and len(digits) > 4:  # counted aloud, and written without a space
        return "".join(_number_in_words(digit, language) for digit in digits)
    try:
        return str(num2words(int(digits), lang="ja" if language in ("zh", "yue") else language))
    except NotImplementedError:
        return digits


@cache
def _english() -> Any:
    from whisper.normalizers import EnglishTextNormalizer

    with warnings.catch_warnings():  # it leaves its list of spellings to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        normaliser = EnglishTextNormalizer()
    normaliser.standardize_numbers = str  # leaves the text as it is
    return normaliser
