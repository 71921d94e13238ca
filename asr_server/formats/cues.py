"""Segments to subtitles: as they are, or their words laid out as whisper's command lays them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from typing import Final, NamedTuple

from asr_server.core import Segment, Word

LONG_PAUSE_S: Final = 3.0  # between the starts of two words, after which a line does not go on

Line = list[Word]


@dataclass(frozen=True)
class SubtitleLayout:
    """None: no limit. Limits need the words' times; without any, a segment is one subtitle of one line.

    With a width alone, a segment is one subtitle of as many lines as it takes. With a width and a number of
    lines, subtitles are filled up whatever the segments.
    """

    max_line_width: int | None = None  # characters
    max_line_count: int | None = None  # lines of a subtitle
    max_words_per_line: int | None = None
    highlight_words: bool = False  # each word underlined while it is said

    @property
    def needs_words(self) -> bool:
        return self != PLAIN_LAYOUT

    @property
    def across_segments(self) -> bool:
        return self.max_line_width is not None and self.max_line_count is not None


PLAIN_LAYOUT = SubtitleLayout()


class Piece(NamedTuple):
    text: str
    underlined: bool = False


class Cue(NamedTuple):
    """One subtitle; its pieces joined are its text, line breaks included."""

    start_s: float
    end_s: float
    pieces: tuple[Piece, ...]
    speaker: str | None = None


def cues(segments: Sequence[Segment], layout: SubtitleLayout) -> list[Cue]:
    """In the order in which they begin. Each is of one speaker."""
    found = (
        cue._replace(speaker=speaker)
        for speaker, of_speaker in groupby(segments, key=lambda segment: segment.speaker)
        for cue in _cues(list(of_speaker), layout)
    )
    return sorted(found, key=lambda cue: cue.start_s)


def _cues(segments: Sequence[Segment], layout: SubtitleLayout) -> Iterator[Cue]:
    if not layout.needs_words or not any(segment.words for segment in segments):
        for segment in segments:
            yield Cue(segment.start_s, segment.end_s, (Piece(_one_line(segment.text)),))
        return
    for words in _runs(segments, layout):
        for lines in _subtitles(words, layout):
            yield from _highlighted(lines) if layout.highlight_words else [_cue(lines)]


def _runs(segments: Sequence[Segment], layout: SubtitleLayout) -> Iterator[Sequence[Word]]:
    """The words that may share a subtitle."""
    if layout.across_segments:
        yield [word for segment in segments for word in segment.words]
        return
    for segment in segments:
        step = layout.max_words_per_line or max(1, len(segment.words))
        for first in range(0, len(segment.words), step):
            yield segment.words[first : first + step]


def _subtitles(words: Sequence[Word], layout: SubtitleLayout) -> Iterator[list[Line]]:
    """Fills lines, and subtitles with lines. A word that is wider than a line has one to itself."""
    lines: list[Line] = []
    width, last_start_s = 0, 0.0
    for word in words:
        pause = layout.across_segments and word.start_s - last_start_s > LONG_PAUSE_S
        last_start_s = word.start_s
        if lines and not pause and width + len(word.text) <= (layout.max_line_width or inf):
            lines[-1].append(word)
            width += len(word.text)
            continue
        if lines and (pause or len(lines) >= (layout.max_line_count or inf)):
            yield lines
            lines = []
        lines.append([word])
        width = len(word.text.strip())
    if lines:
        yield lines


def _cue(lines: list[Line]) -> Cue:
    return Cue(lines[0][0].start_s, lines[-1][-1].end_s, _pieces(lines))


def _highlighted(lines: list[Line]) -> Iterator[Cue]:
    """The same subtitle for each word, and without a word underlined for the time between two."""
    shown_until_s = lines[0][0].start_s
    for word in chain(*lines):
        if word.start_s > shown_until_s:
            yield Cue(shown_until_s, word.start_s, _pieces(lines))
        yield Cue(word.start_s, word.end_s, _pieces(lines, word))
        shown_until_s = word.end_s


def _pieces(lines: list[Line], said: Word | None = None) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for line in lines:
        for word in line:
            space = "" if word is line[0] else " " if word.text[:1].isspace() else ""
            if word is line[0] and pieces:
                space = "\n"
            pieces += [Piece(space), Piece(_one_line(word.text), word is said)]
    return tuple(pieces)


def _one_line(text: str) -> str:
    """A blank line within the text would end the cue."""
    return " ".join(text.split())
