"""The routes of `/v1/listen`."""

import hashlib
from dataclasses import replace
from typing import Final

from fastapi import APIRouter, Request, WebSocket
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from asr_server.annexes.deepgram import shapes
from asr_server.annexes.deepgram.live import ListenDialect
from asr_server.annexes.deepgram.shapes import Json, LiveQuery, Spoken, WholeQuery
from asr_server.annexes.realtime.route import require_service, serve_session
from asr_server.annexes.realtime.session import RealtimeSession
from asr_server.api.errors import body_of, response_to
from asr_server.api.middleware import check_origin
from asr_server.api.models import Models
from asr_server.api.request import TranscriptionRequest, parse_transcription_request
from asr_server.api.schemas import DEFAULT_SPEAKERS
from asr_server.api.state import AppState, get_state, models_of, set_caller
from asr_server.api.transcribe import TranscriptionResponse
from asr_server.api.upload import Form, Pairs, read_body
from asr_server.audio.wav import unsized_header
from asr_server.core import SAMPLE_RATE, Segment, Transcript
from asr_server.errors import InvalidApiKey, InvalidValue, ReportedError
from asr_server.telemetry import current_request_id

REQUEST_ID: Final = "dg-request-id"
SCHEMES: Final = ("token", "bearer")  # of keys, in the header and among a browser's subprotocols

router = APIRouter(prefix="/v1/listen", include_in_schema=False)


def _authorize(connection: HTTPConnection, state: AppState) -> None:
    """Take the key from the header, or from the subprotocols `token, KEY`. Raises InvalidApiKey."""
    given = connection.headers.get("authorization") or " ".join(connection.scope.get("subprotocols", []))
    scheme, _, key = given.partition(" ")
    if state.api_keys.required and scheme.lower() not in SCHEMES:
        raise InvalidApiKey("No API key: send it as 'Authorization: Token KEY'.")
    set_caller(connection, state.api_keys.check(f"Bearer {key}"))


def _refusal(error: Exception) -> Response:
    """Return the error as Deepgram's, with the status and headers that it has anywhere else."""
    answer, own, request_id = response_to(error), body_of(error).error, current_request_id.get()
    body = {"err_code": (own.code or own.type).upper(), "err_msg": own.message, "request_id": request_id}
    headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
    return JSONResponse(body, answer.status_code, headers | {REQUEST_ID: request_id})


# -- Live ----------------------------------------------------------------------------------------------------


@router.websocket("")
async def listen_live(socket: WebSocket) -> None:
    first = next(iter(socket.scope["subprotocols"]), "")
    await serve_session(socket, _session, first if first in SCHEMES else None, _refusal)


def _session(socket: WebSocket, state: AppState) -> RealtimeSession:
    check_origin(socket, state.settings, state.api_keys.required)
    _authorize(socket, state)
    require_service(state)
    query, terms, _ = shapes.read_query(socket.query_params.multi_items(), LiveQuery)
    models = models_of(socket)
    config = shapes.session_config(query, terms, models)
    model = models.choose(config.transcription.model)
    return RealtimeSession(socket, state, config, ListenDialect(query, model, current_request_id.get()))


# -- Whole ---------------------------------------------------------------------------------------------------


@router.post("", response_model=None)
async def listen(request: Request) -> Response:
    state = get_state(request)
    try:
        _authorize(request, state)
        if request.headers.get("content-type", "").startswith("application/json"):
            raise InvalidValue("This server fetches no URL: send the recording as the body.", "url")
        return _Listen(state, request.query_params.multi_items())
    except ReportedError as error:
        return _refusal(error)


class _Listen(TranscriptionResponse):
    def __init__(self, state: AppState, pairs: Pairs) -> None:
        query, self._terms, self._ignored = shapes.read_query(pairs, WholeQuery)
        self._query, self._sha256 = query, hashlib.sha256()
        head = b""
        if query.encoding:  # 16 bits without a header
            head = unsized_header(query.sample_rate or SAMPLE_RATE, query.channels, sample_bytes=2)
        super().__init__(state, self._parse, self._reply, file_head=head)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ReportedError as error:  # the reply is whole: nothing of it is sent yet
            await _refusal(error)(scope, receive, send)

    async def _read(self, connection: Request, form: Form) -> None:
        async for data in read_body(connection, form):
            self._sha256.update(data)

    def _parse(self, pairs: Pairs, models: Models) -> TranscriptionRequest:
        request = parse_transcription_request(shapes.form_pairs(self._query, self._terms, models), models)
        return replace(request, ignored_fields=self._ignored)

    def _reply(self, transcript: Transcript, request: TranscriptionRequest) -> Response:
        request_id, speakers = current_request_id.get(), DEFAULT_SPEAKERS
        groups, numbers = [[*transcript.segments]], dict[str | None, int]()
        if self._query.multichannel:
            groups = [[each for each in transcript.segments if each.speaker == name] for name in speakers]
        elif self._query.is_diarized:
            numbers = {name: n for n, name in enumerate(dict.fromkeys(s.speaker for s in groups[0]))}
        channels = [self._channel(own, numbers, transcript) for own in groups]
        results: Json = {"channels": channels}
        if self._query.utterances:
            results["utterances"] = [
                _utterance(segment, channel, numbers) for channel, own in enumerate(groups) for segment in own
            ]
        sha256, duration_s = self._sha256.hexdigest(), transcript.duration_s
        facts = shapes.metadata(request.model, request_id, sha256, duration_s, len(groups))
        return JSONResponse({"metadata": facts, "results": results}, headers={REQUEST_ID: request_id})

    def _channel(
        self, segments: list[Segment], numbers: dict[str | None, int], transcript: Transcript
    ) -> Json:
        words = [word for segment in segments for word in _spoken(segment, numbers)]
        own = shapes.alternative("".join(segment.text for segment in segments), words)
        if self._query.paragraphs:
            own["paragraphs"] = _paragraphs(segments, numbers)
        channel: Json = {"alternatives": [own]}
        if shapes.is_detecting(self._query) and transcript.languages:
            channel["detected_language"] = transcript.languages[0]
            channel["language_confidence"] = transcript.language_probability
        return channel


def _spoken(segment: Segment, numbers: dict[str | None, int]) -> list[Spoken]:
    speaker = numbers.get(segment.speaker)
    return [
        Spoken(word.text.strip(), word.start_s, word.end_s, word.confidence or 0.0, speaker)
        for word in segment.words
    ]


def _utterance(segment: Segment, channel: int, numbers: dict[str | None, int]) -> Json:
    words = _spoken(segment, numbers)
    utterance: Json = {
        "id": f"{channel}-{segment.id}",
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "confidence": shapes.confidence_of(words),
        "channel": channel,
        "transcript": segment.text.strip(),
        "words": [*map(shapes.word_of, words)],
    }
    return utterance | ({"speaker": numbers[segment.speaker]} if numbers else {})


def _paragraphs(segments: list[Segment], numbers: dict[str | None, int]) -> Json:
    """Return a paragraph for each turn of a speaker, with its segments as sentences."""
    paragraphs: list[Json] = []
    last: str | None = None
    for segment in segments:
        if not paragraphs or segment.speaker != last:
            paragraphs.append({"sentences": [], "num_words": 0, "start": round(segment.start_s, 3)})
            if numbers:
                paragraphs[-1]["speaker"] = numbers[segment.speaker]
        last, own = segment.speaker, paragraphs[-1]
        times = {"start": round(segment.start_s, 3), "end": round(segment.end_s, 3)}
        own["sentences"].append({"text": segment.text.strip(), **times})
        own["num_words"] += len(segment.words)
        own["end"] = times["end"]
    texts = (" ".join(sentence["text"] for sentence in each["sentences"]) for each in paragraphs)
    return {"transcript": "\n\n".join(texts), "paragraphs": paragraphs}
