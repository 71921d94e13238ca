"""Writes a transcript as server-sent events, in OpenAI's streaming shapes. Used by `transcribe.py`."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from asr_server.api.schemas import AudioFields, TextDelta, TextDone
from asr_server.core import Segment, Transcript, TranscriptDelta
from asr_server.formats import (
    DEFAULTS,
    RenderOptions,
    diarized_segment,
    languages_body,
    logprobs_body,
    verbose_body,
)
from asr_server.formats.bodies import TokensUsage
from asr_server.transcription.text import continuation

STREAM_END: Final = b"data: [DONE]\n\n"


class EventWriter:
    """Turns transcript deltas into events. The deltas joined are the text of the last event."""

    def __init__(self, fields: AudioFields, options: RenderOptions = DEFAULTS) -> None:
        """With `diarized_json` each segment is a delta, and an event that names its speaker."""
        self._fields = fields
        self._options = options
        self._text = ""  # of the segments so far
        self._num_audio_tokens = 0
        self._num_text_tokens = 0

    def delta(self, delta: TranscriptDelta) -> bytes:
        """Empty for a delta in which nothing was said."""
        self._num_audio_tokens += delta.num_audio_tokens
        self._num_text_tokens += delta.num_text_tokens
        if not delta.text:
            return b""
        if self._fields.response_format == "diarized_json":
            return b"".join(self._segment(segment, delta.language) for segment in delta.segments)
        return event(
            TextDelta(
                delta=delta.text,
                logprobs=logprobs_body(delta.logprobs) if self._options.with_logprobs else None,
                usage=self._running_usage(),
            )
        )

    def _segment(self, segment: Segment, language: str | None) -> bytes:
        text, completed = continuation(self._text, segment.text, language), diarized_segment(segment)
        self._text += text
        delta = TextDelta(delta=text, segment_id=completed.id, usage=self._running_usage())
        return event(delta) + event(completed)

    def done(self, transcript: Transcript) -> bytes:
        body = TextDone(
            text=transcript.text,
            languages=languages_body(transcript),
            logprobs=logprobs_body(transcript.logprobs) if self._options.with_logprobs else None,
            usage=self._usage() if self._fields.stream_include_usage else None,
        )
        if self._fields.stream_include_segments:
            verbose = verbose_body(transcript, self._options)
            body.language, body.duration = verbose.language, verbose.duration
            body.segments, body.words = verbose.segments, verbose.words
            body.truncated = transcript.is_cut_short or None
        return event(body)

    def _running_usage(self) -> TokensUsage | None:
        return self._usage() if self._fields.stream_continuous_usage_stats else None

    def _usage(self) -> TokensUsage:
        """Strict clients refuse a usage by duration in a stream."""
        return TokensUsage(
            input_tokens=self._num_audio_tokens,
            output_tokens=self._num_text_tokens,
            total_tokens=self._num_audio_tokens + self._num_text_tokens,
        )


def event(body: BaseModel, exclude_none: bool = True) -> bytes:
    return f"data: {body.model_dump_json(exclude_none=exclude_none)}\n\n".encode()
