"""Match the words of a text with those of a transcript, in order. Pure.

rapidfuzz finds the longest course of equal words: hours take a second, without the interpreter lock. What
matches by chance is dropped.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final, NamedTuple

from rapidfuzz.distance import Indel

from asr_server.checkpoint.tokenizer import num_letters

# A match by chance is short, with more words beside it that do not match.
FEWEST_LETTERS: Final = 20  # that stand together, in a text that has so many
MAX_BETWEEN: Final = 6  # words that do not match, between those that stand together
LEAST_SHARE: Final = 0.5  # of words that match, where such stand together

_LETTERS: Final = re.compile(r"[^\W_]+")
_ONE_BY_ONE: Final = re.compile(r"\w[^\w\s]*|[^\w\s]+")  # of a language without spaces


class Part(NamedTuple):
    """The letters of a word, or of a part of one: `well-known` has two."""

    letters: str
    word: int


def words_in(text: str, is_spaced: bool) -> list[str]:
    """Return the text's words, or its characters if not `is_spaced`; marks alone go with the word beside."""
    words: list[str] = []
    for found in re.finditer(r"\S+" if is_spaced else _ONE_BY_ONE, text):
        if words and not (letters_in(found[0]) and letters_in(words[-1])):
            words[-1] += f" {found[0]}" if is_spaced else found[0]
        else:
            words.append(found[0])
    return words if any(map(letters_in, words)) else []


def letters_in(text: str) -> list[str]:
    """Return runs of letters and figures, without case, apostrophes and loose accents."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    bare = "".join(c for c in folded if c not in "'’`" and not unicodedata.combining(c))
    return _LETTERS.findall(bare)


def parts_of(words: Sequence[str]) -> list[Part]:
    return [Part(letters, number) for number, word in enumerate(words) for letters in letters_in(word)]


Pair = tuple[int, int]


def matched(a: Sequence[str], b: Sequence[str]) -> list[Pair]:
    """Return the pairs of places that match, in order, each place once."""
    blocks = Indel.opcodes(a, b).as_matching_blocks()
    pairs = [(i + n, j + n) for i, j, size in blocks for n in range(size)]
    fewest = min(FEWEST_LETTERS, num_letters("".join(a)), num_letters("".join(b)))
    return _grown([pair for group in _together(pairs) if _stands(group, a, fewest) for pair in group], a, b)


def _together(pairs: Sequence[Pair]) -> list[list[Pair]]:
    groups: list[list[Pair]] = []
    for pair in pairs:
        if groups and max(pair[0] - groups[-1][-1][0], pair[1] - groups[-1][-1][1]) <= MAX_BETWEEN + 1:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return groups


def _stands(group: Sequence[Pair], words: Sequence[str], fewest: int) -> bool:
    (i, j), (i_last, j_last) = group[0], group[-1]
    is_dense = len(group) >= LEAST_SHARE * (1 + max(i_last - i, j_last - j))
    return is_dense and num_letters("".join(words[place] for place, _ in group)) >= fewest


def _grown(pairs: Sequence[Pair], a: Sequence[str], b: Sequence[str]) -> list[Pair]:
    """Take in equal words beside those that stand: they may have matched elsewhere by chance."""
    found, others = dict(pairs), {j for _, j in pairs}
    for step in (-1, 1):
        for i, j in pairs:
            i, j = i + step, j + step
            while 0 <= i < len(a) and 0 <= j < len(b) and a[i] == b[j] and i not in found and j not in others:
                found[i] = j
                others.add(j)
                i, j = i + step, j + step
    return sorted(found.items())
