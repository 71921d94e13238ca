"""Write SubRip and WebVTT, with readable cues, the model's segments (`raw`) or whisper's layout."""

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from typing import Final

from asr_server.core import Segment, Word
from asr_server.formats.cue_breaks import Cue, readable_cues

# Between the starts of two words: a subtitle that is filled up whatever the segments ends there.
LONG_PAUSE_S: Final = 3.0


@dataclass(frozen=True)
class SubtitleLayout:
    """Limits of cues; None is no limit. All but raw segments need word times.

    As in whisper's command, a width alone wraps each segment; with a number of lines cues cross segments.
    """

    raw: bool = False  # the model's segments, as OpenAI gives them
    max_line_width: int | None = None  # characters
    max_line_count: int | None = None  # lines of a cue
    max_words_per_line: int | None = None  # words of a cue; does nothing beside the two above together
    highlight_words: bool = False  # each word underlined while it is spoken

    @property
    def needs_words(self) -> bool:
        return self != RAW_LAYOUT

    @property
    def across_segments(self) -> bool:
        return self.max_line_width is not None and self.max_line_count is not None


READABLE_LAYOUT: Final = SubtitleLayout()
RAW_LAYOUT: Final = SubtitleLayout(raw=True)


def cues(
    segments: Sequence[Segment], layout: SubtitleLayout, is_labelled: bool = False, end_s: float = inf
) -> list[Cue]:
    """Return cues by start, each of one speaker; labels get room if `is_labelled`."""
    end_s = max([end_s, *(segment.end_s for segment in segments)])
    made = (
        cue._replace(end_s=min(cue.end_s, end_s), speaker=speaker)
        for speaker, of_speaker in groupby(segments, key=lambda segment: segment.speaker)
        for cue in _cues(list(of_speaker), layout, len(speaker) + 2.0 if speaker and is_labelled else 0.0)
    )
    return sorted(made, key=lambda cue: cue.start_s)


def _cues(segments: Sequence[Segment], layout: SubtitleLayout, label_width: float) -> Iterator[Cue]:
    for has_words, group in groupby(segments, key=lambda segment: bool(segment.words)):
        if not layout.needs_words or not has_words:
            for segment in group:
                whole = Word(segment.text, segment.start_s, segment.end_s)
                yield Cue(segment.start_s, segment.end_s, [[whole]])
            continue
        for cue in _of_words(list(group), layout, label_width):
            yield from _highlighted(cue.lines) if layout.highlight_words else [cue]


def _of_words(segments: Sequence[Segment], layout: SubtitleLayout, label_width: float) -> Iterator[Cue]:
    if not (layout.raw or layout.max_line_width or layout.max_line_count or layout.max_words_per_line):
        yield from readable_cues([word for segment in segments for word in segment.words], label_width)
        return
    for words in _runs(segments, layout):
        for lines in _subtitles(words, layout):
            yield Cue(lines[0][0].start_s, lines[-1][-1].end_s, lines)


def _runs(segments: Sequence[Segment], layout: SubtitleLayout) -> Iterator[Sequence[Word]]:
    if layout.across_segments:
        yield [word for segment in segments for word in segment.words]
        return
    for segment in segments:
        step = layout.max_words_per_line or len(segment.words)
        for first in range(0, len(segment.words), step):
            yield segment.words[first : first + step]


def _subtitles(words: Sequence[Word], layout: SubtitleLayout) -> Iterator[list[list[Word]]]:
    lines: list[list[Word]] = []
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


def _highlighted(lines: Sequence[Sequence[Word]]) -> Iterator[Cue]:
    shown_until_s = lines[0][0].start_s
    for word in chain(*lines):
        if word.start_s > shown_until_s:
            yield Cue(shown_until_s, word.start_s, lines)
        yield Cue(word.start_s, word.end_s, lines, word)
        shown_until_s = word.end_s


def srt(segments: Sequence[Segment], layout: SubtitleLayout = READABLE_LAYOUT, end_s: float = inf) -> str:
    return "".join(
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{_labelled(cue)}\n\n"
        for number, cue in enumerate(cues(segments, layout, is_labelled=True, end_s=end_s), start=1)
    )


def vtt(segments: Sequence[Segment], layout: SubtitleLayout = READABLE_LAYOUT, end_s: float = inf) -> str:
    blocks = (
        f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_voiced(cue)}\n\n"
        for cue in cues(segments, layout, end_s=end_s)
    )
    return "WEBVTT\n\n" + "".join(blocks)


def _labelled(cue: Cue) -> str:
    text = _text(cue, str)
    return f"{cue.speaker}: {text}" if cue.speaker else text


def _voiced(cue: Cue) -> str:
    text = _text(cue, _escape)
    return f"<v {_escape(cue.speaker)}>{text}</v>" if cue.speaker else text


def _text(cue: Cue, escape: Callable[[str], str]) -> str:
    """Remove arrows (`-->`), which would end the subtitle."""
    text = "\n".join("".join(_shown(word, cue, escape) for word in line).lstrip() for line in cue.lines)
    return text.replace("-->", "->")


def _shown(word: Word, cue: Cue, escape: Callable[[str], str]) -> str:
    text = escape(" ".join(word.text.split()))  # in one line: a blank one would end the subtitle
    return " " * word.text[:1].isspace() + (f"<u>{text}</u>" if word is cue.highlighted else text)


def _escape(text: str) -> str:
    return html.escape(text.replace("-->", "->"), quote=False)


def _clock(time_s: float, point: str) -> str:
    seconds, ms = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{ms:03d}"


def tsv(segments: Iterable[Segment]) -> str:
    """Write the model's segments as a table, in milliseconds, as whisper's command does."""
    lines = (
        f"{round(1000 * s.start_s)}\t{round(1000 * s.end_s)}\t{s.text.strip().replace(chr(9), ' ')}\n"
        for s in segments
    )
    return "start\tend\ttext\n" + "".join(lines)
