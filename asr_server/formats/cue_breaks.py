"""Choose where subtitles begin and lines break, by Netflix's timed text style guides.

At most 42 letters (16 of Chinese) a line, two lines, 20 letters a second; a cue lasts at least a second.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.core import Word

MAX_LINE_WIDTH: Final = 42.0  # Latin letters
WIDE_LETTER: Final = MAX_LINE_WIDTH / 16  # Chinese, Japanese, Korean: 16 a line
MIN_DURATION_S: Final = 1.0
MAX_DURATION_S: Final = 7.0
MAX_LETTERS_PER_S: Final = 20.0
PAUSE_S: Final = 1.0  # no cue reaches across one
_MAX_WORDS: Final = int(2 * MAX_LINE_WIDTH)

# What a break costs, and what else makes a cue worse. Only their order and rough size matter.
_COST_PER_CUE: Final = 0.5
_COST_OF_SENTENCE_INSIDE: Final = 1.0  # a sentence ends within the cue
_COST_OF_CLAUSE_END: Final = 1.0
_COST_BEFORE_SMALL_WORD: Final = 2.0
_COST_BETWEEN_WORDS: Final = 4.0
_COST_BEHIND_SMALL_WORD: Final = 6.0
_COST_TOO_SHORT: Final = 100.0
_COST_PER_SPEED: Final = 0.1  # for each letter a second above the limit

_SENTENCE_ENDS: Final = tuple(".?!…。？！।؟")
_CLAUSE_ENDS: Final = tuple(",;:—–，、；：،")
_CLOSERS: Final = "\"'”’»)]」』）"
# Conjunctions, prepositions and articles of the languages most asked for: a line may begin with one.
_SMALL: Final = """
    and or but nor so that which who because if when while than as to of in on at for with from by into
    about after before until a an the
    und oder aber dass der die das den dem des ein eine einen einem einer weil wenn als in im an am auf aus
    bei mit nach von vom zu zum zur für über unter um durch
    et ou mais que qui où le la les un une des du de à au aux dans en sur pour par avec sans
    y o pero que el los las del al con por para sin en su
    e o ma che il lo gli uno di da con su per tra fra del della nel nella
    mas os um uma do dos das no na nos nas com sem
    en of maar dat het een van voor met naar bij op
"""
_SMALL_WORDS: Final = frozenset(_SMALL.split())


class Cue(NamedTuple):
    start_s: float
    end_s: float
    lines: Sequence[Sequence[Word]]
    highlighted: Word | None = None
    speaker: str | None = None


def readable_cues(words: Sequence[Word], label_width: float = 0.0) -> Iterator[Cue]:
    """Yield cues of at most two lines and 1 to 7 s, cut at sentences, clauses or small words."""
    starts = [
        first + start for first, end in _runs(words) for start in _cue_starts(words[first:end], label_width)
    ]
    for first, end in pairwise([*starts, len(words)]):
        yield _cue(words[first:end], label_width, words[end].start_s if end < len(words) else inf)


def _runs(words: Sequence[Word]) -> Iterator[tuple[int, int]]:
    pauses = (i for i, (a, b) in enumerate(pairwise(words), start=1) if b.start_s - a.end_s >= PAUSE_S)
    return pairwise([0, *pauses, len(words)]) if words else iter(())


def _cue(words: Sequence[Word], label_width: float, next_start_s: float) -> Cue:
    start_s, end_s = words[0].start_s, words[-1].end_s
    wanted_s = max(MIN_DURATION_S, line_width(words) / MAX_LETTERS_PER_S)
    end_s = min(max(end_s, start_s + wanted_s), max(next_start_s, end_s), start_s + MAX_DURATION_S)
    return Cue(start_s, end_s, _lines(words, MAX_LINE_WIDTH - label_width))


def _cue_starts(words: Sequence[Word], label_width: float) -> list[int]:
    cuts = _Cuts(words, MAX_LINE_WIDTH - label_width)
    cost, previous = np.full(len(words) + 1, np.inf), [0] * (len(words) + 1)
    cost[0] = 0
    for end in range(1, len(words) + 1):
        lowest = max(0, end - _MAX_WORDS)
        costs = cost[lowest:end] + cuts.costs(lowest, end)
        best = int(costs.argmin())
        cost[end], previous[end] = costs[best], lowest + best
    starts = [previous[len(words)]]
    while starts[-1]:
        starts.append(previous[starts[-1]])
    return starts[::-1]


class _Cuts:
    def __init__(self, words: Sequence[Word], first_line_width: float) -> None:
        n = len(words)
        self._widths = np.array([0.0, *accumulate(letters_width(word.text) for word in words)])
        self._spaces = np.array([float(word.text[:1].isspace()) for word in words] + [0.0])
        self._starts_s = np.array([word.start_s for word in words] + [words[-1].end_s + PAUSE_S])
        self._ends_s = np.array([word.end_s for word in words])
        self._breaks = np.array([0.0] + [break_cost(*pair) for pair in pairwise(words)] + [0.0])
        self._sentences = np.cumsum(self._breaks[: n + 1] == 0)
        # The first word that no longer fits into the first line, for a cue that begins at each word.
        limits = self._widths[:n] + self._spaces[:n] + first_line_width
        self._line_ends = np.maximum(self._widths.searchsorted(limits, "right") - 1, np.arange(n) + 1)

    def costs(self, lowest: int, end: int) -> npt.NDArray[np.float64]:
        firsts = slice(lowest, end)
        widths = self._widths[end] - self._widths[firsts] - self._spaces[firsts]
        line_ends = np.minimum(self._line_ends[firsts], end)
        second_widths = self._widths[end] - self._widths[line_ends] - self._spaces[line_ends]
        shown_s = np.minimum(self._starts_s[end] - self._starts_s[firsts], MAX_DURATION_S)
        fits = (second_widths <= MAX_LINE_WIDTH) & (
            self._ends_s[end - 1] - self._starts_s[firsts] <= MAX_DURATION_S
        )
        fits[-1] = True  # a single word, however wide
        speeds = widths / np.maximum(shown_s, 0.01)
        costs: npt.NDArray[np.float64] = (
            _COST_PER_CUE
            + self._breaks[end]
            + _COST_OF_SENTENCE_INSIDE * (self._sentences[end - 1] - self._sentences[firsts])
            + _COST_TOO_SHORT * (shown_s < MIN_DURATION_S)
            + _COST_PER_SPEED * np.maximum(speeds - MAX_LETTERS_PER_S, 0)
        )
        costs[~fits] = np.inf
        return costs


def break_cost(left: Word, right: Word) -> float:
    """Return the cost of a break between two words; 0 at a sentence's end."""
    text = left.text.rstrip().rstrip(_CLOSERS)
    if text.endswith(_SENTENCE_ENDS):
        return 0.0
    if text.endswith(_CLAUSE_ENDS):
        return _COST_OF_CLAUSE_END
    if text.strip().lower() in _SMALL_WORDS:
        return _COST_BEHIND_SMALL_WORD
    return _COST_BEFORE_SMALL_WORD if right.text.strip().lower() in _SMALL_WORDS else _COST_BETWEEN_WORDS


def _lines(words: Sequence[Word], first_width: float) -> list[Sequence[Word]]:
    if line_width(words) <= first_width or len(words) == 1:
        return [words]
    return min(
        ([words[:i], words[i:]] for i in range(1, len(words))),
        key=lambda lines: _line_break_cost(lines[0], lines[1], first_width),
    )


def _line_break_cost(first: Sequence[Word], second: Sequence[Word], first_width: float) -> float:
    widths = line_width(first), line_width(second)
    excess = max(0.0, widths[0] - first_width) + max(0.0, widths[1] - MAX_LINE_WIDTH)
    return _COST_TOO_SHORT * excess + break_cost(first[-1], second[0]) + abs(widths[0] - widths[1]) / 8


def line_width(words: Sequence[Word]) -> float:
    return letters_width("".join(word.text for word in words).strip())


def letters_width(text: str) -> float:
    if text.isascii():
        return float(len(text))
    return sum(
        WIDE_LETTER if unicodedata.east_asian_width(c) in "WF" else 1.0
        for c in text
        if not unicodedata.combining(c)
    )
