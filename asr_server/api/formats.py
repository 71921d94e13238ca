"""A transcript in each of OpenAI's shapes."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

from pydantic import BaseModel
from starlette.responses import Response

from asr_server.api.schemas import (
    DurationUsage,
    Json,
    Logprob,
    ResponseFormat,
    TextDelta,
    TextDone,
    TokensUsage,
    VerboseJson,
    VerboseSegment,
)
from asr_server.core import Passage, Segment, TokenLogprob, Transcript

STREAM_END: Final = b"data: [DONE]\n\n"

_MEDIA_TYPES: Final = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain",
    "srt": "application/x-subrip",
    "vtt": "text/vtt",
}


def response(
    transcript: Transcript, response_format: ResponseFormat, with_logprobs: bool = False
) -> Response:
    """The whole reply to a request that does not stream."""
    body = render(transcript, response_format, with_logprobs)
    media_type = _MEDIA_TYPES[response_format]
    charset = "" if media_type == "application/json" else "; charset=utf-8"
    return Response(body.encode(), headers={"content-type": media_type + charset})


def render(transcript: Transcript, response_format: ResponseFormat, with_logprobs: bool = False) -> str:
    match response_format:
        case "json":
            return _dump(json_body(transcript, with_logprobs))
        case "verbose_json":
            return _dump(verbose_body(transcript))
        case "text":
            return transcript.text
        case "srt":
            return srt(transcript.segments)
        case "vtt":
            return vtt(transcript.segments)


def _dump(body: BaseModel) -> str:
    """Nothing in a body is null: what is not there is left out."""
    return body.model_dump_json(exclude_none=True)


# -- JSON ----------------------------------------------------------------------------------------------------


def json_body(transcript: Transcript, with_logprobs: bool = False) -> Json:
    return Json(
        text=transcript.text,
        logprobs=_logprobs(transcript.logprobs) if with_logprobs else None,
        usage=_duration_usage(transcript),
    )


def verbose_body(transcript: Transcript) -> VerboseJson:
    return VerboseJson(
        task=transcript.task,
        language=transcript.language,
        duration=_seconds(transcript.duration_s),
        text=transcript.text,
        segments=[_segment(segment) for segment in transcript.segments],
        usage=_duration_usage(transcript),
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
    )


def _seconds(time_s: float) -> float:
    """To the millisecond: finer than any time that is known here."""
    return round(time_s, 3)


def _duration_usage(transcript: Transcript) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(transcript.duration_s))


def _logprobs(entries: Iterable[TokenLogprob]) -> list[Logprob]:
    return [Logprob(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in entries]


# -- Subtitles -----------------------------------------------------------------------------------------------


def srt(segments: Sequence[Segment]) -> str:
    """SubRip: numbered from 1, commas before the milliseconds, a blank line behind each. Empty for none."""
    return "".join(
        f"{number}\n{_clock(s.start_s, ',')} --> {_clock(s.end_s, ',')}\n{_line(s.text)}\n\n"
        for number, s in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT; its text is markup, so that `&`, `<` and `>` are escaped."""
    cues = (
        f"{_clock(s.start_s, '.')} --> {_clock(s.end_s, '.')}\n{html.escape(_line(s.text), quote=False)}\n\n"
        for s in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    """A blank line or an arrow within the text would end the cue."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(time_s: float, point: str) -> str:
    """`HH:MM:SS,mmm`; hours have more digits where they need them."""
    seconds, ms = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{ms:03d}"


# -- Server-sent events --------------------------------------------------------------------------------------


class EventWriter:
    """Passages to events. The deltas joined are the text of the last event."""

    def __init__(self, with_logprobs: bool, with_usage: bool, with_running_usage: bool) -> None:
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._with_running_usage = with_running_usage
        self._num_audio_tokens = 0
        self._num_text_tokens = 0

    def delta(self, passage: Passage) -> bytes:
        """Empty for a passage in which nothing was said."""
        self._num_audio_tokens += passage.num_audio_tokens
        self._num_text_tokens += passage.num_text_tokens
        if not passage.text:
            return b""
        return event(
            TextDelta(
                delta=passage.text,
                logprobs=_logprobs(passage.logprobs) if self._with_logprobs else None,
                usage=self._usage() if self._with_running_usage else None,
            )
        )

    def done(self, transcript: Transcript) -> bytes:
        return event(
            TextDone(
                text=transcript.text,
                logprobs=_logprobs(transcript.logprobs) if self._with_logprobs else None,
                usage=self._usage() if self._with_usage else None,
            )
        )

    def _usage(self) -> TokensUsage:
        """Strict clients refuse a usage by duration in a stream."""
        return TokensUsage(
            input_tokens=self._num_audio_tokens,
            output_tokens=self._num_text_tokens,
            total_tokens=self._num_audio_tokens + self._num_text_tokens,
        )


def event(body: BaseModel, exclude_none: bool = True) -> bytes:
    return f"data: {body.model_dump_json(exclude_none=exclude_none)}\n\n".encode()
