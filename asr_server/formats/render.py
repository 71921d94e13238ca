"""A transcript as text in each of OpenAI's response formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from asr_server.core import Segment, TokenLogprob, Transcript
from asr_server.formats.bodies import (
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
from asr_server.formats.cues import PLAIN_LAYOUT, SubtitleLayout
from asr_server.formats.subtitles import srt, vtt

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]


@dataclass(frozen=True)
class RenderOptions:
    """What goes into a transcript's text beyond its format."""

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
    """Nothing in a body is null: what is not there is left out."""
    return body.model_dump_json(exclude_none=True)


def json_body(transcript: Transcript, with_logprobs: bool = False) -> Json:
    return Json(
        text=transcript.text,
        languages=languages_body(transcript),
        logprobs=logprobs_body(transcript.logprobs) if with_logprobs else None,
        usage=_duration_usage(transcript),
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
    """In the order of the text, where two speakers talk at once in the order in which they begin."""
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
    """To the millisecond: finer than any time that is known here."""
    return round(time_s, 3)


def _duration_usage(transcript: Transcript) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(_seconds(transcript.duration_s)))


def languages_body(transcript: Transcript) -> list[Language]:
    return [Language(code=code) for code in transcript.languages]


def logprobs_body(entries: Iterable[TokenLogprob]) -> list[Logprob]:
    return [Logprob(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in entries]
