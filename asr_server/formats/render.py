"""Render a transcript in OpenAI's response formats: JSON bodies, text and subtitles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from asr_server.core import Segment, TokenLogprob, Transcript, Word
from asr_server.formats.bodies import (
    AudioTrack,
    DiarizedJson,
    DiarizedSegment,
    DroppedSegment,
    DurationUsage,
    Json,
    Language,
    Logprob,
    VerboseJson,
    VerboseSegment,
    VerboseWord,
)
from asr_server.formats.subtitles import READABLE_LAYOUT, SubtitleLayout, srt, tsv, vtt

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]
FileFormat = ResponseFormat | Literal["tsv"]  # that of files besides, as whisper's command writes it


@dataclass(frozen=True)
class RenderOptions:
    with_logprobs: bool = False
    with_segments: bool = True
    with_words: bool = False
    layout: SubtitleLayout = READABLE_LAYOUT

    def needs_words(self, formats: Iterable[FileFormat]) -> bool:
        has_cues = not {"srt", "vtt"}.isdisjoint(formats)
        return self.with_words or (has_cues and self.layout.needs_words)


DEFAULTS = RenderOptions()


def render(transcript: Transcript, response_format: FileFormat, options: RenderOptions = DEFAULTS) -> str:
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
            return srt(transcript.segments, options.layout, transcript.duration_s)
        case "vtt":
            return vtt(transcript.segments, options.layout, transcript.duration_s)
        case "tsv":
            return tsv(transcript.segments)


def _dump(body: BaseModel) -> str:
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
        dropped=dropped_body(transcript),
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
    words = [(word, segment.speaker) for segment in transcript.segments for word in segment.words]
    if any(speaker is not None for _, speaker in words):
        words.sort(key=lambda each: each[0].start_s)
    for word, speaker in words:
        yield word_body(word, word.text.strip(), speaker)


def word_body(word: Word, text: str, speaker: str | None = None) -> VerboseWord:
    times = {"start": _seconds(word.start_s), "end": _seconds(word.end_s)}
    return VerboseWord(word=text, **times, probability=word.probability, speaker=speaker)


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
    return round(time_s, 3)


def _duration_usage(transcript: Transcript) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(_seconds(transcript.duration_s)))


def languages_body(transcript: Transcript) -> list[Language]:
    return [Language(code=code) for code in transcript.languages]


def tracks_body(transcript: Transcript) -> list[AudioTrack] | None:
    bodies = [AudioTrack(number=t.number, language=t.language, title=t.title) for t in transcript.tracks]
    return bodies or None


def dropped_body(transcript: Transcript) -> list[DroppedSegment] | None:
    bodies = [
        DroppedSegment(start=_seconds(d.start_s), end=_seconds(d.end_s), text=d.text, reason=d.reason)
        for d in transcript.dropped
    ]
    return bodies or None


def logprobs_body(entries: Iterable[TokenLogprob]) -> list[Logprob]:
    return [Logprob(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in entries]
