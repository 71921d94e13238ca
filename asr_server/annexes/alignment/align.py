"""Give each word of a text its time in a recording that has been transcribed.

A word that the transcript has too has its time there. What lies between such words is read once
more (`stretches.py`), and marked as not spoken where the decoder finds it unlikely.
"""

import asyncio
import difflib
import math
from bisect import bisect
from collections.abc import Iterator, Sequence, Set
from itertools import chain, groupby
from statistics import fmean
from typing import Final, NamedTuple

import msgspec

from asr_server.annexes.alignment.matching import Part, letters_in, matched, parts_of, words_in
from asr_server.annexes.alignment.stretches import OpenRecording, Stretch, StretchReader
from asr_server.core import Transcript, Word
from asr_server.errors import InvalidValue
from asr_server.language_codes import UNSPACED
from asr_server.levels import runs
from asr_server.transcription.confidence import LEAST_PROBABILITY
from asr_server.transcription.transcriber import Transcriber
from asr_server.transcription.word_times import edges_by_letters

# Of a stretch's words, the mean: of words that are said up to 4.2, but for figures; of others 6 to 9.
MAX_LOSS: Final = 4.5
LEAST_LIKENESS: Final = 0.6  # of the letters of names, say, that were heard as others
GREATEST_LOSS: Final = -math.log(LEAST_PROBABILITY)


class AlignedWord(NamedTuple):
    text: str  # as it was given
    start_s: float
    end_s: float
    is_spoken: bool = True  # else it has no length, and lies where it would be said
    confidence: float | None = None  # the probability that it was said; None after a replica was lost
    loss: float | None = None  # minus the logarithm of its tokens' mean probability; None likewise

    @property
    def characters(self) -> list[tuple[str, float, float]]:
        """Return each character, its start and its end: a share of the word's time."""
        characters = [each for each in self.text if not each.isspace()]
        edges_s = edges_by_letters(characters, self.start_s, self.end_s)
        return [(each, *edge_s) for each, edge_s in zip(characters, edges_s, strict=True)]


class Alignment(NamedTuple):
    words: list[AlignedWord]  # all of the text
    not_in_text: list[Word]  # what was said besides, in runs
    transcript: Transcript
    is_spaced: bool

    @property
    def loss(self) -> float | None:
        losses = [word.loss for word in self.words if word.loss is not None and word.is_spoken]
        return fmean(losses) if losses else None

    def not_spoken(self) -> Iterator[Word]:
        """Yield each run of words that nobody says, where it would be said."""
        space = " " if self.is_spaced else ""
        for first, end in runs([not word.is_spoken for word in self.words]).tolist():
            run = self.words[first:end]
            yield Word(space.join(word.text for word in run), run[0].start_s, run[0].start_s)


def require_words(text: str) -> None:
    """Raises InvalidValue."""
    if not letters_in(text):
        raise InvalidValue("'text' has no word.", "text")


async def align(
    text: str, transcript: Transcript, transcriber: Transcriber, open_recording: OpenRecording
) -> Alignment:
    """Align a text that has words. Raises what a second reading of the recording raises."""
    language = transcript.languages[0] if transcript.languages else None
    is_spaced, heard = language not in UNSPACED, transcript.words
    words = words_in(text, is_spaced)
    timed, used = await asyncio.to_thread(_as_heard, words, heard)
    places = list(_between(timed, transcript.duration_s))
    reader = StretchReader(
        transcriber, open_recording, language, is_spaced, words, timed, transcript.duration_s
    )
    middles_s = [(word.start_s + word.end_s) / 2 for word in heard]
    for place, said in await reader.read(places):
        there = range(bisect(middles_s, place.start_s), bisect(middles_s, place.end_s))
        is_likely = fmean(map(_loss, said)) <= MAX_LOSS
        if is_likely or _likeness(said, [heard[i] for i in there]) >= LEAST_LIKENESS:
            timed[place.first : place.end] = said
            used.update(there)
    return Alignment(list(_placed(words, timed)), list(_besides(heard, used)), transcript, is_spaced)


def _as_heard(words: Sequence[str], heard: Sequence[Word]) -> tuple[list[Word | None], set[int]]:
    """Return the times of words that match whole, and the numbers of those that matched."""
    given, others = parts_of(words), parts_of([word.text for word in heard])
    found = dict(matched([part.letters for part in given], [part.letters for part in others]))
    times_s = _times_of_parts(others, heard)
    timed: list[Word | None] = [None] * len(words)
    used: set[int] = set()
    for number, own in groupby(range(len(given)), key=lambda place: given[place].word):
        places = list(own)
        matches = [found[place] for place in places if place in found]
        if len(matches) == len(places):
            sources = {others[match].word for match in matches}
            least = min((heard[source] for source in sources), key=lambda word: word.confidence or 0.0)
            start_s, end_s = times_s[matches[0]][0], times_s[matches[-1]][1]
            timed[number] = msgspec.structs.replace(least, text=words[number], start_s=start_s, end_s=end_s)
            used |= sources
    return timed, used


def _times_of_parts(parts: Sequence[Part], heard: Sequence[Word]) -> list[tuple[float, float]]:
    """Share out each word's time among its parts, by their letters."""
    times_s: list[tuple[float, float]] = []
    for number, own in groupby(parts, key=lambda part: part.word):
        word = heard[number]
        times_s += edges_by_letters([part.letters for part in own], word.start_s, word.end_s)
    return times_s


def _between(timed: Sequence[Word | None], duration_s: float) -> Iterator[Stretch]:
    for first, end in runs([word is None for word in timed]).tolist():
        before, behind = timed[first - 1] if first else None, timed[end] if end < len(timed) else None
        start_s, end_s = before.end_s if before else 0.0, behind.start_s if behind else duration_s
        yield Stretch(first, end, start_s, end_s)


def _likeness(said: Sequence[Word], heard: Sequence[Word]) -> float:
    own, others = ("".join(chain(*(letters_in(word.text) for word in words))) for words in (said, heard))
    return difflib.SequenceMatcher(None, own, others, autojunk=False).ratio()


def _loss(word: Word) -> float:
    return -math.log(max(LEAST_PROBABILITY, word.probability or 0.0))


def _placed(words: Sequence[str], timed: Sequence[Word | None]) -> Iterator[AlignedWord]:
    at_s = 0.0
    for text, word in zip(words, timed, strict=True):
        if word is None:
            yield AlignedWord(text, at_s, at_s, is_spoken=False)
        else:
            loss = None if word.probability is None else _loss(word)
            yield AlignedWord(text, word.start_s, word.end_s, True, word.confidence, loss)
            at_s = word.end_s


def _besides(heard: Sequence[Word], used: Set[int]) -> Iterator[Word]:
    is_besides = [number not in used and bool(letters_in(word.text)) for number, word in enumerate(heard)]
    for first, end in runs(is_besides).tolist():
        text = "".join(word.text for word in heard[first:end]).strip()
        yield Word(text, heard[first].start_s, heard[end - 1].end_s)
