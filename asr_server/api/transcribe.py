"""Answer one transcription request: read the form, transcribe, reply whole or as events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Final, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asr_server import metrics
from asr_server.api.events import EventStream, EventWriter
from asr_server.api.middleware import OVER_LIMIT
from asr_server.api.models import Models, ServedModel
from asr_server.api.openapi import form_of, transcript_responses
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.schemas import (
    DROPPED,
    IGNORED_FIELDS,
    MODEL_LIMIT,
    TRACKS,
    TRUNCATED,
    TranscriptionFields,
    TranslationFields,
)
from asr_server.api.state import AppState, get_state, metered, models_of, require_key
from asr_server.api.upload import FILE, Form, Pairs, read_form
from asr_server.audio.recording import Recording, Source
from asr_server.config import naming
from asr_server.core import Transcript
from asr_server.errors import InvalidValue, Overloaded, ShuttingDown
from asr_server.formats.render import FORMATS, JSON, DiarizedJson, Json, VerboseJson, render
from asr_server.transcription.transcriber import OpenRequest, Transcription, task_group

STREAM_END: Final = b"data: [DONE]\n\n"
Made = TypeVar("Made")
RequestParser = Callable[[Pairs, Models], TranscriptionRequest]
ReplyMaker = Callable[[Transcript, TranscriptionRequest], Response]

RETRY_CONNECTION_S: Final = 5.0
_MAX_NAMED: Final = 32  # fields
_MAX_NAME: Final = 80  # characters of a field's name
# Of a longer transcript the reply is made in a thread: for twelve hours with words it takes a second.
SEGMENTS_INLINE: Final = 100

logger = logging.getLogger(__name__)


class TranscriptionResponse(Response):
    """A response that works while it is sent, so that one task owns the request."""

    def __init__(
        self,
        state: AppState,
        parse_request: RequestParser,
        make_reply: ReplyMaker | None = None,
        file_name: str = FILE,
        file_head: bytes = b"",
    ) -> None:
        super().__init__()
        self._state = state
        self._parse_request = parse_request
        self._make_reply = make_reply or body_response
        self._file_name, self._file_head = file_name, file_head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        try:
            state.models.require_engine()
        except ShuttingDown:
            while (await receive()).get("more_body", False):
                pass  # the reply closes the connection, which would reset it before the client has read
            raise
        if scope.get("state", {}).get(OVER_LIMIT):
            message = f"Too many connections are open: {naming('max_connections')}."
            raise Overloaded(message, retry_after_s=RETRY_CONNECTION_S)
        connection, stats = Request(scope, receive), metrics.current_request_stats()
        with (
            metered(connection),
            state.admission.enter(stats.key),
            closing(Form(state.settings.max_upload_bytes, state.uploads, self._file_name)) as form,
        ):
            if self._file_head:
                form.upload.add(self._file_head)
            with stats.stage("upload"):
                await self._read(connection, form)
            request = self._parse_request(form.fields, models_of(connection))
            if request.fields.background:
                response = await self._in_background(connection, form, request)
            elif request.is_streamed:
                await _stream(state, form, request, receive, send)
                return
            else:
                response = await self._whole(form, request, receive)
                with stats.stage("reply"):
                    await response(scope, receive, send)
                return
        await response(scope, receive, send)  # a job's stream, which may be left: no drain waits for it

    async def _in_background(
        self, connection: Request, form: Form, request: TranscriptionRequest
    ) -> Response:
        take = self._state.take_in_background
        if take is None or self._make_reply is not body_response:
            raise InvalidValue(
                f"'background' needs a server with {naming('jobs_dir')}, and a route of OpenAI's.",
                "background",
            )
        return await take(connection, form, request)

    async def _read(self, connection: Request, form: Form) -> None:
        await read_form(connection, form)

    async def _whole(self, form: Form, request: TranscriptionRequest, receive: Receive) -> Response:
        transcript = await whole_transcript(self._state, form, request, receive)
        return await whole_answer(transcript, request, self._make_reply)


async def whole_transcript(
    state: AppState, form: Form, request: TranscriptionRequest, receive: Receive
) -> Transcript:
    async with transcribing(state, form, request, receive) as transcription:
        async for _ in transcription:
            pass
        return await transcription.transcript()


async def whole_answer(
    transcript: Transcript, request: TranscriptionRequest, make_reply: ReplyMaker
) -> Response:
    response = await rendered(transcript, lambda: make_reply(transcript, request))
    response.headers.update(answer_headers(request.model, request.ignored_fields))
    response.headers.update(recording_headers(transcript))
    return response


async def rendered(transcript: Transcript, make: Callable[[], Made]) -> Made:
    with metrics.current_request_stats().stage("render"):
        if len(transcript.segments) <= SEGMENTS_INLINE:
            return make()
        return await asyncio.to_thread(make)


@asynccontextmanager
async def transcribing(
    state: AppState, form: Form, request: TranscriptionRequest, receive: Receive
) -> AsyncIterator[Transcription]:
    """Transcribe while the block runs, unless the client leaves. The body must have been read.

    Send the last message behind the block: a server may call a complete reply a disconnect.
    Raises ClientDisconnect.
    """
    stats = metrics.current_request_stats()
    with closing(form), stats.stage("transcription"):
        async with task_group() as group:
            watch = group.create_task(_wait_for_disconnect(receive))
            async with state.admission.acquire(stats.key), request.model.using():
                recording = recording_for(request, await form.upload.source())
                async with await transcription_of(state, request, recording) as transcription:
                    yield transcription
            watch.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


def recording_for(request: TranscriptionRequest, source: Source) -> Recording:
    limits, is_split = request.model.audio_limits, bool(request.speakers)
    return Recording(source, limits, is_split, choice=request.track_choice, clips=request.clips)


async def transcription_of(
    state: AppState,
    request: TranscriptionRequest,
    recording: Recording,
    open_request: OpenRequest | None = None,
) -> AbstractAsyncContextManager[Transcription]:
    labeller, fields = None, request.fields
    if request.count is not None and isinstance(fields, TranscriptionFields):
        names, references = fields.known_speaker_names, fields.known_speaker_references
        labeller = await state.follow_speakers(request.count, names, references, state.pool)
    run = request.model.transcriber.run
    return run(recording, request.options, request.speakers, labeller, open_request)


def body_response(transcript: Transcript, request: TranscriptionRequest) -> Response:
    response_format = request.fields.response_format
    body = render(transcript, response_format, request.render_options)
    media_type = FORMATS[response_format].media_type
    charset = "" if media_type == JSON else "; charset=utf-8"
    return Response(body.encode(), headers={"content-type": media_type + charset})


async def _stream(
    state: AppState, form: Form, request: TranscriptionRequest, receive: Receive, send: Send
) -> None:
    stream = EventStream(send, answer_headers(request.model, request.ignored_fields))
    try:
        async with transcribing(state, form, request, receive) as transcription:
            writer = EventWriter(request.fields, request.render_options)
            async for delta in transcription:
                stream.write(writer.delta(delta))
            transcript = await transcription.transcript()
            stream.write(await rendered(transcript, lambda: writer.done(transcript)))
        stream.write(STREAM_END)
    except (Exception, asyncio.CancelledError) as error:
        if not stream.has_begun:
            raise
        if isinstance(error, ClientDisconnect):
            stream.cancel()
            return  # nobody is left to tell
        stream.fail(error if isinstance(error, Exception) else ShuttingDown())
    await stream.end()


def answer_headers(model: ServedModel, ignored_fields: Sequence[str] = ()) -> dict[str, str]:
    headers = {}
    if model.limit:
        headers[MODEL_LIMIT] = model.limit
    if ignored_fields:
        names = (quote(name[:_MAX_NAME], safe="[]") for name in ignored_fields[:_MAX_NAMED])
        headers[IGNORED_FIELDS] = ", ".join(names)
    return headers


def recording_headers(transcript: Transcript) -> dict[str, str]:
    headers = {TRUNCATED: "true"} if transcript.is_cut_short else {}
    if transcript.tracks:
        headers[TRACKS] = ",".join(str(track.number) for track in transcript.tracks)
    if transcript.dropped:
        headers[DROPPED] = str(len(transcript.dropped))
    return headers


router = APIRouter(prefix="/v1/audio", dependencies=[Depends(require_key)], tags=["audio"])


@router.post(
    "/transcriptions",
    openapi_extra=form_of(TranscriptionFields),
    responses=transcript_responses(Json, VerboseJson, DiarizedJson),
    response_model=None,
)
async def transcribe(request: Request) -> Response:
    """Return a recording's text in its own language."""
    return TranscriptionResponse(get_state(request), parse_transcription_request)


@router.post(
    "/translations",
    openapi_extra=form_of(TranslationFields),
    responses=transcript_responses(Json, VerboseJson),
    response_model=None,
)
async def translate(request: Request) -> Response:
    """Return a recording's text in English."""
    return TranscriptionResponse(get_state(request), parse_translation_request)
