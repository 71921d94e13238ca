"""Turn a transcript into OpenAI's server-sent events, and send them as the client reads."""

import asyncio
import logging
from typing import Final

from pydantic import BaseModel
from starlette.types import Send

from asr_server.api.errors import body_of
from asr_server.api.schemas import AudioFields, TextDelta
from asr_server.core import Segment, Transcript, TranscriptDelta
from asr_server.errors import ChunkFailed, RequestError, ServiceUnavailable
from asr_server.formats import render
from asr_server.formats.render import RenderOptions, TokensUsage
from asr_server.language_codes import continuation

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold the events back
}
_OF_VERBOSE: Final = render.VerboseJson.model_fields.keys() & render.TextDone.model_fields.keys()

logger = logging.getLogger(__name__)


class EventWriter:
    def __init__(self, fields: AudioFields, options: RenderOptions = render.DEFAULTS) -> None:
        self._fields = fields
        self._options = options
        self._text = ""  # of the segments so far
        self._num_audio_tokens = 0
        self._num_text_tokens = 0

    def delta(self, delta: TranscriptDelta) -> bytes:
        self._num_audio_tokens += delta.num_audio_tokens
        self._num_text_tokens += delta.num_text_tokens
        if not delta.text:
            return b""
        if self._fields.response_format == "diarized_json" and self._fields.channels == "split":
            return b"".join(self._segment(segment, delta.language) for segment in delta.segments)
        return event(
            TextDelta(
                delta=delta.text,
                logprobs=render.logprobs_body(delta.logprobs) if self._options.with_logprobs else None,
                usage=self._running_usage(),
            )
        )

    def _segment(self, segment: Segment, language: str | None) -> bytes:
        text, completed = continuation(self._text, segment.text, language), self._diarized(segment)
        self._text += text
        delta = TextDelta(delta=text, segment_id=completed.id, usage=completed.usage)
        return event(delta) + event(completed)

    def _diarized(self, segment: Segment) -> render.DiarizedSegment:
        return render.diarized_segment(segment).model_copy(update={"usage": self._running_usage()})

    def done(self, transcript: Transcript) -> bytes:
        shows_segments = self._fields.stream_include_segments
        fields = dict(render.verbose_body(transcript, self._options)) if shows_segments else {}
        fields = {name: fields[name] for name in _OF_VERBOSE & fields.keys()} | {
            "text": transcript.text,
            "languages": render.languages_body(transcript),
            "logprobs": render.logprobs_body(transcript.logprobs) if self._options.with_logprobs else None,
            "usage": self._usage() if self._fields.stream_include_usage else None,
            "truncated": transcript.is_cut_short or None,
            "tracks": render.tracks_body(transcript),
            "dropped": render.dropped_body(transcript),
        }
        by_voice = self._fields.response_format == "diarized_json" and self._fields.channels != "split"
        segments = map(self._diarized, transcript.segments) if by_voice else ()
        return b"".join(map(event, segments)) + event(render.TextDone(**fields))

    def _running_usage(self) -> TokensUsage | None:
        return self._usage() if self._fields.stream_continuous_usage_stats else None

    def _usage(self) -> TokensUsage:
        """Count tokens: strict clients refuse durations in a stream."""
        return TokensUsage(
            input_tokens=self._num_audio_tokens,
            output_tokens=self._num_text_tokens,
            total_tokens=self._num_audio_tokens + self._num_text_tokens,
        )


def event(body: BaseModel, exclude_none: bool = True) -> bytes:
    return f"data: {body.model_dump_json(exclude_none=exclude_none)}\n\n".encode()


class EventStream:
    """Start at the first write: earlier errors get their own status. A task sends to slow readers."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = headers
        self._unsent = asyncio.Queue[bytes | None]()  # at the end None
        self._sending: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._sending is not None

    def write(self, events: bytes) -> None:
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        if events:
            self._unsent.put_nowait(events)

    async def _send_all(self) -> None:
        headers = [(name.encode(), value.encode()) for name, value in (HEADERS | self._headers).items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while (events := await self._unsent.get()) is not None:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def fail(self, error: Exception) -> None:
        expected = isinstance(error, RequestError | ServiceUnavailable | ChunkFailed)
        logger.warning("a stream has failed: %r", error, exc_info=None if expected else error)
        self.write(event(body_of(error), exclude_none=False))

    async def end(self) -> None:
        self._unsent.put_nowait(None)
        assert self._sending is not None
        await self._sending

    def cancel(self) -> None:
        assert self._sending is not None
        self._sending.cancel()
