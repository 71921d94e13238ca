"""When each word was said: the token times of the engine, without the pauses around words.

A token's time from the alignment is where the attention moves on to it, which may be anywhere between two
words. Where a pause lies between what was attended to most for one word and for the next, the one ends with
it and the other begins after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.core import ChunkResult, Word

MAX_OUTSIDE_S: Final = 0.5  # of its segment, that a word may begin or end: as openai/whisper
MIN_PAUSE_S: Final = 0.03

Pause = tuple[float, float]  # start and end


class AlignedWord(NamedTuple):
    """In seconds from the start of the part, as everything here."""

    text: str
    start_s: float
    end_s: float
    first_peak_s: float  # where its first token attends to most
    last_peak_s: float


def aligned_word(text: str, result: ChunkResult, first: int, end: int) -> AlignedWord:
    """Of the text tokens from `first` to before `end`."""
    times_s, peaks_s = result.token_times_s, result.token_peaks_s
    return AlignedWord(text, times_s[first], times_s[end], peaks_s[first], peaks_s[end - 1])


def leave_out_pauses(
    words: Sequence[AlignedWord], pauses_s: Sequence[Pause], end_s: float
) -> list[AlignedWord]:
    """
    Args:
        end_s: what the last word cannot reach: the end of the audio, or what the next token attends to.
    """
    settled, pauses = list(words), np.array(pauses_s, float).reshape(-1, 2)
    for i in range(len(words) + 1):
        after_s = words[i - 1].last_peak_s if i > 0 else 0.0
        before_s = words[i].first_peak_s if i < len(words) else end_s
        pause = _longest(pauses, after_s, before_s)
        if pause is None:
            continue
        if i > 0:
            settled[i - 1] = settled[i - 1]._replace(end_s=pause[0])
        if i < len(words):
            settled[i] = settled[i]._replace(start_s=pause[1])
    return settled


def _longest(pauses: npt.NDArray[np.float64], after_s: float, before_s: float) -> Pause | None:
    first, last = np.searchsorted(pauses[:, 1], after_s), np.searchsorted(pauses[:, 0], before_s)
    within = pauses[first:last].clip(after_s, before_s)
    if not len(within):
        return None
    start_s, end_s = within[np.argmax(within[:, 1] - within[:, 0])].tolist()
    return (start_s, end_s) if end_s - start_s >= MIN_PAUSE_S else None


def words_within(words: Sequence[AlignedWord], start_s: float, end_s: float) -> list[Word]:
    """The words of one segment: the outer ones do not lie far outside it, and no time runs backwards."""
    made: list[Word] = []
    for i, word in enumerate(words):
        too_early = i == 0 and word.start_s < start_s - MAX_OUTSIDE_S
        too_late = i == len(words) - 1 and word.end_s > end_s + MAX_OUTSIDE_S
        first_s = max(
            min(start_s, word.end_s) if too_early else word.start_s, made[-1].end_s if made else 0.0
        )
        made.append(Word(word.text, first_s, max(end_s if too_late else word.end_s, first_s)))
    return made
