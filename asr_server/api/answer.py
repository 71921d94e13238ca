"""From the door to the last byte of one request for text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asr_server.api import formats
from asr_server.api.client import while_client_stays
from asr_server.api.errors import body_of, shutting_down
from asr_server.api.form import Form, read_form
from asr_server.api.job import Job
from asr_server.api.rooms import Rooms
from asr_server.audio import Recording
from asr_server.config import Settings
from asr_server.errors import ChunkFailed, EngineUnavailable, RequestError
from asr_server.transcription import Transcriber

JobReader = Callable[[list[tuple[str, str]], Transcriber, Settings], Job]

logger = logging.getLogger(__name__)


class Answer(Response):
    """A response whose work happens while it is sent, so that one task owns the request from end to end.

    Errors before the first byte become an error body, because the application's handlers see them.
    """

    def __init__(self, rooms: Rooms, read_job: JobReader) -> None:
        super().__init__()
        self._rooms = rooms
        self._read_job = read_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rooms = self._rooms
        rooms.require_engine()
        form = Form(rooms.settings.max_upload_bytes)
        try:
            with rooms.waiting_room.place():
                await read_form(Request(scope, receive), form, rooms.settings.max_upload_bytes)
                job = self._read_job(form.fields, rooms.transcriber, rooms.settings)
                recording = Recording(await form.upload.source(), rooms.audio_limits)
                if job.stream:
                    await _stream(rooms.transcriber, recording, job, receive, send)
                else:
                    response = await _whole(rooms.transcriber, recording, job, receive)
                    await response(scope, receive, send)
        finally:
            form.close()


async def _whole(transcriber: Transcriber, recording: Recording, job: Job, receive: Receive) -> Response:
    async with while_client_stays(receive), transcriber.transcribe(recording, job.options) as course:
        async for _ in course:
            pass
        transcript = course.transcript()
    return formats.response(transcript, job.response_format, job.with_logprobs)


async def _stream(
    transcriber: Transcriber, recording: Recording, job: Job, receive: Receive, send: Send
) -> None:
    stream = _EventStream(send)
    try:
        async with while_client_stays(receive), transcriber.transcribe(recording, job.options) as course:
            writer = job.event_writer()
            async for passage in course:
                await stream.write(writer.delta(passage))
            await stream.write(writer.done(course.transcript()))
        await stream.write(formats.STREAM_END)
    except ClientDisconnect:
        if stream.has_begun:
            return  # nobody is left to tell
        raise
    except asyncio.CancelledError:
        if not stream.has_begun:
            raise
        await stream.fail(shutting_down())
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
        await self.write(formats.event(body_of(error), exclude_none=False))

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
