"""Renders a transcript in each of OpenAI's response formats: JSON bodies, plain text and subtitles.

SubRip and WebVTT take segments as they are, or their words laid out as whisper's command lays them out. Used
by `api`, `offline` and `cli/transcribe.py`, in the API process or that of `asr-server transcribe`; does not
know where transcripts come from.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel

from asr_server.core import Segment, TokenLogprob, Transcript, Word
from asr_server.formats.bodies import (
    AudioTrack,
    DiarizedJson,
    DiarizedSegment,
    DurationUsage,
    Json,
    Language,
    Logprob,
    VerboseJson,
    VerboseSegment,
    VerboseWord,
)

# Between the starts of two words: a subtitle that is filled up whatever the segments ends there.
LONG_PAUSE_S: Final = 3.0

Line = list[Word]


@dataclass(frozen=True)
class SubtitleLayout:
    """How words are laid out in subtitles.

    None is no limit. Limits need the words' times; without limits, a segment is a subtitle of one line.

    With a width alone, a segment is one subtitle of as many lines as it takes. With a width and a number of
    lines, subtitles are filled up whatever the segments.
    """

    max_line_width: int | None = None  # characters
    max_line_count: int | None = None  # lines of a subtitle
    max_words_per_line: int | None = None  # words of a subtitle; does nothing beside the two above together
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
    """Makes the subtitles, in the order in which they begin. Each is of one speaker."""
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
    """Yields the groups of words within which words may share a subtitle."""
    if layout.across_segments:
        yield [word for segment in segments for word in segment.words]
        return
    for segment in segments:
        step = layout.max_words_per_line or max(1, len(segment.words))
        for first in range(0, len(segment.words), step):
            yield segment.words[first : first + step]


def _subtitles(words: Sequence[Word], layout: SubtitleLayout) -> Iterator[list[Line]]:
    """Fills lines with words, and subtitles with lines. A word wider than a line has a line to itself."""
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
    """Repeats a subtitle with each word underlined in turn, and with none between two words."""
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
    """Joins the lines of a text: a blank line within it would end the subtitle."""
    return " ".join(text.split())


def srt(segments: Sequence[Segment], layout: SubtitleLayout = PLAIN_LAYOUT) -> str:
    """Writes SubRip: numbered from 1, commas before milliseconds, a blank line after each. Empty for none."""
    return "".join(
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{_labelled(cue)}\n\n"
        for number, cue in enumerate(cues(segments, layout), start=1)
    )


def vtt(segments: Sequence[Segment], layout: SubtitleLayout = PLAIN_LAYOUT) -> str:
    """Returns WebVTT, whose text is markup: `&`, `<` and `>` are escaped."""
    blocks = (
        f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_voiced(cue)}\n\n"
        for cue in cues(segments, layout)
    )
    return "WEBVTT\n\n" + "".join(blocks)


def _labelled(cue: Cue) -> str:
    text = _text(cue, str)
    return f"{cue.speaker}: {text}" if cue.speaker else text


def _voiced(cue: Cue) -> str:
    """Returns the text, within WebVTT's voice tag if the speaker is known."""
    text = _text(cue, _escape)
    return f"<v {_escape(cue.speaker)}>{text}</v>" if cue.speaker else text


def _text(cue: Cue, escape: Callable[[str], str]) -> str:
    """Returns the text without arrows (`-->`), which would end the subtitle."""
    pieces = (f"<u>{escape(p.text)}</u>" if p.underlined else escape(p.text) for p in cue.pieces)
    return "".join(pieces).replace("-->", "->")


def _escape(text: str) -> str:
    return html.escape(text.replace("-->", "->"), quote=False)


def _clock(time_s: float, point: str) -> str:
    """Writes a time as `HH:MM:SS,mmm`, with `point` for the comma; hours have more digits where they need
    them.
    """
    seconds, ms = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{ms:03d}"


ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]


@dataclass(frozen=True)
class RenderOptions:
    """Options of a rendered transcript besides its format."""

    with_logprobs: bool = False
    with_segments: bool = True
    with_words: bool = False
    layout: SubtitleLayout = PLAIN_LAYOUT


DEFAULTS = RenderOptions()


def render(transcript: Transcript, response_format: ResponseFormat, options: RenderOptions = DEFAULTS) -> str:
    match response_format:
        case "json":
            return _dump(json_body(transcript, options.with_logprobs))
        case "verbose_json":
            return _dump(verbose_body(transcript, options))
        case "diarized_json":
            return _dump(diarized_body(transcript))
        case "text":
            return transcript.text
        case "srt":
            return srt(transcript.segments, options.layout)
        case "vtt":
            return vtt(transcript.segments, options.layout)


def _dump(body: BaseModel) -> str:
    """Writes a body as JSON. Fields that are None are left out: nothing is null."""
    return body.model_dump_json(exclude_none=True)


def json_body(transcript: Transcript, with_logprobs: bool = False) -> Json:
    return Json(
        text=transcript.text,
        languages=languages_body(transcript),
        logprobs=logprobs_body(transcript.logprobs) if with_logprobs else None,
        usage=_duration_usage(transcript),
        truncated=transcript.is_cut_short or None,
        tracks=tracks_body(transcript),
    )


def verbose_body(transcript: Transcript, options: RenderOptions = DEFAULTS) -> VerboseJson:
    return VerboseJson(
        task=transcript.task,
        language=transcript.language,
        duration=_seconds(transcript.duration_s),
        text=transcript.text,
        segments=[_segment(segment) for segment in transcript.segments] if options.with_segments else None,
        words=list(_words(transcript)) if options.with_words else None,
        usage=_duration_usage(transcript),
        truncated=transcript.is_cut_short or None,
        tracks=tracks_body(transcript),
        language_probability=transcript.language_probability,
        languages=languages_body(transcript) if len(transcript.languages) > 1 else None,
    )


def _segment(segment: Segment) -> VerboseSegment:
    return VerboseSegment(
        id=segment.id,
        seek=segment.seek,
        start=_seconds(segment.start_s),
        end=_seconds(segment.end_s),
        text=segment.text,
        tokens=list(segment.tokens),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
        speaker=segment.speaker,
    )


def _words(transcript: Transcript) -> Iterator[VerboseWord]:
    """Yields the words in the order of the text; if there are speakers, in the order in which they begin."""
    words = [(word, segment.speaker) for segment in transcript.segments for word in segment.words]
    if any(speaker is not None for _, speaker in words):
        words.sort(key=lambda each: each[0].start_s)
    for word, speaker in words:
        yield VerboseWord(
            word=word.text.strip(), start=_seconds(word.start_s), end=_seconds(word.end_s), speaker=speaker
        )


def diarized_body(transcript: Transcript) -> DiarizedJson:
    return DiarizedJson(
        duration=_seconds(transcript.duration_s),
        text=transcript.text,
        segments=[diarized_segment(segment) for segment in transcript.segments],
        usage=_duration_usage(transcript),
        truncated=transcript.is_cut_short or None,
        tracks=tracks_body(transcript),
    )


def diarized_segment(segment: Segment) -> DiarizedSegment:
    assert segment.speaker is not None
    return DiarizedSegment(
        id=f"seg_{segment.id + 1:03d}",
        start=_seconds(segment.start_s),
        end=_seconds(segment.end_s),
        speaker=segment.speaker,
        text=segment.text.strip(),
    )


def _seconds(time_s: float) -> float:
    """Rounds to the millisecond, which is finer than any time that is known here."""
    return round(time_s, 3)


def _duration_usage(transcript: Transcript) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(_seconds(transcript.duration_s)))


def languages_body(transcript: Transcript) -> list[Language]:
    return [Language(code=code) for code in transcript.languages]


def tracks_body(transcript: Transcript) -> list[AudioTrack] | None:
    """Return the tracks that were read; None for a file that has no choice of them."""
    bodies = [AudioTrack(number=t.number, language=t.language, title=t.title) for t in transcript.tracks]
    return bodies or None


def logprobs_body(entries: Iterable[TokenLogprob]) -> list[Logprob]:
    return [Logprob(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in entries]
