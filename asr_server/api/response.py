"""Answers one transcription request: reads the form, transcribes, and sends the reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asr_server.api.disconnect import cancel_on_disconnect
from asr_server.api.errors import body_of
from asr_server.api.events import STREAM_END, event
from asr_server.api.form import Form, read_form
from asr_server.api.request import TranscriptionRequest
from asr_server.api.state import AppState
from asr_server.audio import Recording
from asr_server.config import Settings
from asr_server.core import Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, RequestError, ShuttingDown
from asr_server.formats import RenderOptions, ResponseFormat, render
from asr_server.transcription import Transcriber

RequestParser = Callable[[list[tuple[str, str]], Transcriber, Settings], TranscriptionRequest]

_MEDIA_TYPES: Final = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain",
    "srt": "application/x-subrip",
    "vtt": "text/vtt",
}

logger = logging.getLogger(__name__)


class TranscriptionResponse(Response):
    """A response whose work happens while it is sent, so that one task owns the request from end to end.

    Errors before the first byte become an error body, because the application's handlers see them.
    """

    def __init__(self, state: AppState, parse_request: RequestParser) -> None:
        super().__init__()
        self._state = state
        self._parse_request = parse_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        state.require_engine()
        form = Form(state.settings.max_upload_bytes)
        try:
            with state.admission.acquire():
                await read_form(Request(scope, receive), form, state.settings.max_upload_bytes)
                request = self._parse_request(form.fields, state.transcriber, state.settings)
                recording = Recording(await form.upload.source(), state.audio_limits)
                if request.stream:
                    await _stream(state.transcriber, recording, request, receive, send)
                else:
                    response = await _whole(state.transcriber, recording, request, receive)
                    await response(scope, receive, send)
        finally:
            form.close()


async def _whole(
    transcriber: Transcriber, recording: Recording, request: TranscriptionRequest, receive: Receive
) -> Response:
    async with cancel_on_disconnect(receive), transcriber.transcribe(recording, request.options) as session:
        async for _ in session:
            pass
        transcript = session.transcript()
    return _body_response(transcript, request.response_format, request.render_options)


def _body_response(
    transcript: Transcript, response_format: ResponseFormat, options: RenderOptions
) -> Response:
    """The whole reply to a request that does not stream."""
    body = render(transcript, response_format, options)
    media_type = _MEDIA_TYPES[response_format]
    charset = "" if media_type == "application/json" else "; charset=utf-8"
    return Response(body.encode(), headers={"content-type": media_type + charset})


async def _stream(
    transcriber: Transcriber,
    recording: Recording,
    request: TranscriptionRequest,
    receive: Receive,
    send: Send,
) -> None:
    stream = _EventStream(send)
    try:
        async with (
            cancel_on_disconnect(receive),
            transcriber.transcribe(recording, request.options) as session,
        ):
            writer = request.event_writer()
            async for delta in session:
                await stream.write(writer.delta(delta))
            await stream.write(writer.done(session.transcript()))
        await stream.write(STREAM_END)
    except ClientDisconnect:
        if stream.has_begun:
            return  # nobody is left to tell
        raise
    except asyncio.CancelledError:
        if not stream.has_begun:
            raise
        await stream.fail(ShuttingDown())
    except Exception as error:
        if not stream.has_begun:
            raise
        await stream.fail(error)
    await stream.end()


class _EventStream:
    """Begins with the first write, so that an error before it can still have a status of its own."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send

    async def write(self, events: bytes) -> None:
        if not self.has_begun:
            await self._begin()
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def _begin(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would hold the events back
        ]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def fail(self, error: Exception) -> None:
        expected = isinstance(error, RequestError | EngineUnavailable | ChunkFailed)
        logger.warning("a stream has failed: %r", error, exc_info=None if expected else error)
        await self.write(event(body_of(error), exclude_none=False))

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
