"""Match the words of a text with those of a transcript, in order. Pure.

Rare runs of four words that both have fix the course (a patience diff), so hours take a second; difflib
matches what is left between. What matches by chance is dropped.
"""

import difflib
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from asr_server.checkpoint.tokenizer import num_letters

GRAM: Final = 4  # words in a row that fix the course, where both sides have them once
ROUNDS: Final = 3  # what a whole chapter has twice, a stretch of it may have once
MAX_CELLS: Final = 40_000  # of difflib's: 200 words on each side
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
    pairs = list(_matched(a, b, (0, 0), (len(a), len(b)), ROUNDS))
    fewest = min(FEWEST_LETTERS, num_letters("".join(a)), num_letters("".join(b)))
    return _grown([pair for group in _together(pairs) if _stands(group, a, fewest) for pair in group], a, b)


def _matched(a: Sequence[str], b: Sequence[str], first: Pair, end: Pair, rounds: int) -> Iterator[Pair]:
    (i, j), (i_end, j_end) = first, end
    while i < i_end and j < j_end and a[i] == b[j]:
        yield i, j
        i, j = i + 1, j + 1
    while i < i_end and j < j_end and a[i_end - 1] == b[j_end - 1]:
        i_end, j_end = i_end - 1, j_end - 1
    if (i_end - i) * (j_end - j) <= MAX_CELLS:
        blocks = difflib.SequenceMatcher(None, a[i:i_end], b[j:j_end], autojunk=False).get_matching_blocks()
        yield from ((i + own + n, j + other + n) for own, other, size in blocks for n in range(size))
    elif rounds and (course := _course(_grams(a, i, i_end), _grams(b, j, j_end))):
        for here, there in pairwise([(i, j), *course, (i_end, j_end)]):
            yield from _matched(a, b, here, there, rounds - 1)
    yield from zip(range(i_end, end[0]), range(j_end, end[1]), strict=True)


def _grams(words: Sequence[str], first: int, end: int) -> dict[tuple[str, ...], int]:
    """Return the places of runs that come once."""
    runs = [tuple(words[at : at + GRAM]) for at in range(first, end - GRAM + 1)]
    counts = Counter(runs)
    return {run: at for at, run in enumerate(runs, first) if counts[run] == 1}


def _course(own: dict[tuple[str, ...], int], others: dict[tuple[str, ...], int]) -> list[Pair]:
    """Return the longest course that goes on in both."""
    lasts: list[int] = []  # the least place at which a course of each length ends
    before: dict[Pair, Pair | None] = {}  # in the best course that ends with the pair
    ends: list[Pair] = []  # the last pair of the course behind each entry of `lasts`
    for run, at in own.items():
        if (other := others.get(run)) is not None:
            length = bisect_left(lasts, other)
            before[at, other] = ends[length - 1] if length else None
            lasts[length : length + 1], ends[length : length + 1] = [other], [(at, other)]
    course, pair = list[Pair](), ends[-1] if ends else None
    while pair is not None:
        course.append(pair)
        pair = before[pair]
    return course[::-1]


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
