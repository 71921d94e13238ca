"""The replies of each route for `/openapi.json`: bodies, examples, headers, every error.

The routes' modules take their `responses` from here. An error is described by making it: its status, headers
and body are those of `api.errors`, so that the description cannot differ from the reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from asr_server.api.answer_headers import IGNORED_FIELDS, MODEL_LIMIT
from asr_server.api.errors import response_to
from asr_server.api.realtime.schemas import ClientSecret, ClientSecretRequest
from asr_server.api.request_id import REQUEST_ID
from asr_server.api.schemas import AudioFields, ErrorBody
from asr_server.errors import (
    AudioTooLong,
    AudioTooShort,
    DecodingUnavailable,
    EngineUnavailable,
    HeadersTooLarge,
    InvalidApiKey,
    InvalidAudio,
    InvalidValue,
    ModelNotFound,
    Overloaded,
    ReplicasEnded,
    RequestStalled,
    ShuttingDown,
    StorageUnavailable,
    TooSlow,
    UploadTooLarge,
)
from asr_server.formats.bodies import DiarizedJson, Json, VerboseJson

Responses = dict[int | str, dict[str, Any]]

REF: Final = "#/components/schemas/{model}"
_HEADERS: Final[Mapping[str, str]] = {
    REQUEST_ID: "The request's id: the one that was sent, or a new one. The server's log names it.",
    MODEL_LIMIT: "What the embedded model cannot do; absent with any other model.",
    IGNORED_FIELDS: "The fields that were left out, where the server ignores unknown ones.",
    "retry-after": "Seconds to wait before the next try.",
    "retry-after-ms": "The same in milliseconds.",
    "www-authenticate": "How to send a key.",
    "x-should-retry": "`false`: another try would fail as well.",
    "connection": "`close`: this server is about to stop.",
    "x-accel-buffering": "With a stream `no`: a proxy is not to hold the events back.",
}


def _reference(body: type) -> dict[str, str]:
    return {"$ref": REF.format(model=body.__name__)}


# -- Errors --------------------------------------------------------------------------------------------------

OF_EVERY_REQUEST: Final = (
    InvalidValue("Invalid HTTP request received."),
    TooSlow("No whole request within 10 seconds: --header-timeout-s (ASR_SERVER_HEADER_TIMEOUT_S)."),
    HeadersTooLarge("The request has more than 128 headers."),
    RuntimeError("a fault of the server"),
)
OF_A_KEY: Final = (InvalidApiKey("Incorrect API key."),)
OF_A_MODEL: Final = (ModelNotFound("The model 'whisper-9' does not exist. Served here: whisper-1."),)
OF_AN_ENGINE: Final = (EngineUnavailable("The engine is starting."), ShuttingDown())
OF_AN_UPLOAD: Final = (
    InvalidValue("Unknown field 'temprature'.", "temprature"),
    InvalidAudio("The file is empty."),
    AudioTooShort("The recording is shorter than 0.1 s."),
    AudioTooLong("The recording is longer than 43200 s: --max-audio-s (ASR_SERVER_MAX_AUDIO_S)."),
    UploadTooLarge(
        "The upload is over 26214400 bytes: --max-upload-bytes (ASR_SERVER_MAX_UPLOAD_BYTES).", "file"
    ),
    Overloaded("256 requests are in flight.", retry_after_s=1.0),
    ReplicasEnded(4),
    RequestStalled("The request came to a standstill and was ended: nothing of it has moved for 60 s."),
    StorageUnavailable("The temporary folder is full."),
    DecodingUnavailable("The process that decoded the file was ended by the system."),
)


def error_responses(*errors: Exception) -> Responses:
    """The replies to these errors and to those that any request can meet, by status."""
    responses: Responses = {}
    for error in (*OF_EVERY_REQUEST, *errors):
        reply = response_to(error)
        entry = responses.setdefault(reply.status_code, _error_response(reply.status_code))
        entry["headers"] |= described_headers(*(name for name in reply.headers if name in _HEADERS))
        examples = entry["content"]["application/json"]["examples"]
        examples[_example_name(error)] = {"value": msgspec.json.decode(bytes(reply.body))}
    return responses


def _error_response(status: int) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "headers": described_headers(REQUEST_ID),
        "content": {"application/json": {"schema": _reference(ErrorBody), "examples": {}}},
    }


def _example_name(error: Exception) -> str:
    return getattr(error, "code", None) or ("engine_crashed" if isinstance(error, ReplicasEnded) else "fault")


def described_headers(*names: str) -> dict[str, Any]:
    return {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in names}


# -- Transcripts ---------------------------------------------------------------------------------------------

_USAGE: Final = {"type": "duration", "seconds": 3}
_JSON: Final = {"text": "three one four", "languages": [{"code": "en"}], "usage": _USAGE}
_SEGMENT: Final = {
    "id": 0,
    "seek": 0,
    "start": 0.3,
    "end": 2.1,
    "text": " three one four",
    "tokens": [50364, 308, 465],
    "temperature": 0.0,
    "avg_logprob": -0.1,
    "compression_ratio": 0.7,
    "no_speech_prob": 0.01,
}
_VERBOSE: Final = {
    "task": "transcribe",
    "language": "english",
    "duration": 2.5,
    "text": "three one four",
    "segments": [_SEGMENT],
    "usage": _USAGE,
}
_DIARIZED: Final = {
    "task": "transcribe",
    "duration": 2.5,
    "text": "three one four",
    "usage": _USAGE,
    "segments": [
        {
            "type": "transcript.text.segment",
            "id": "0",
            "start": 0.3,
            "end": 2.1,
            "speaker": "A",
            "text": " three one four",
        }
    ],
}
_EVENTS: Final = (
    'data: {"type":"transcript.text.delta","delta":"three one four"}\n\n'
    'data: {"type":"transcript.text.done","text":"three one four","languages":[{"code":"en"}]}\n\n'
    "data: [DONE]\n\n"
)
_TEXTS: Final = {
    "text/plain": ("`response_format` text", "three one four"),
    "application/x-subrip": (
        "`response_format` srt",
        "1\n00:00:00,300 --> 00:00:02,100\nthree one four\n\n",
    ),
    "text/vtt": (
        "`response_format` vtt",
        "WEBVTT\n\n00:00:00.300 --> 00:00:02.100\nthree one four\n\n",
    ),
    "text/event-stream": (
        "`stream` true: each `data:` is a TextDelta (diarized_json: or a DiarizedSegment), then "
        "a TextDone, then `[DONE]`. An error after the first event is an ErrorBody.",
        _EVENTS,
    ),
}


def transcript_responses() -> Responses:
    """Every reply to an upload."""
    as_json = {
        "schema": {"anyOf": [_reference(Json), _reference(VerboseJson), _reference(DiarizedJson)]},
        "examples": {
            "json": {"value": _JSON},
            "verbose_json": {"value": _VERBOSE},
            "diarized_json": {"value": _DIARIZED},
        },
    }
    texts = {
        media_type: {"schema": {"type": "string", "description": meaning}, "example": example}
        for media_type, (meaning, example) in _TEXTS.items()
    }
    transcript = {
        "description": "The transcript, in the form that was asked for.",
        "headers": described_headers(REQUEST_ID, MODEL_LIMIT, IGNORED_FIELDS, "x-accel-buffering"),
        "content": {"application/json": as_json} | texts,
    }
    return {200: transcript} | error_responses(*OF_A_KEY, *OF_A_MODEL, *OF_AN_ENGINE, *OF_AN_UPLOAD)


def form_of(fields_type: type[AudioFields]) -> dict[str, Any]:
    """The form of an upload; it is read by `form.py`, not by the framework."""
    content = {"multipart/form-data": {"schema": _reference(fields_type)}}
    return {"requestBody": {"required": True, "content": content}}


# -- Operations ----------------------------------------------------------------------------------------------

CLIENT_SECRET_BODY: Final = {
    "requestBody": {"content": {"application/json": {"schema": _reference(ClientSecretRequest)}}}
}


def client_secret_responses() -> Responses:
    secret = {
        "description": "The secret, and the session that it opens.",
        "content": {"application/json": {"schema": _reference(ClientSecret)}},
    }
    return {200: secret} | error_responses(*OF_A_KEY, *OF_A_MODEL)


def metrics_responses() -> Responses:
    content = {"text/plain": {"schema": {"type": "string"}, "example": "asr_ready 1.0\n"}}
    return {200: {"description": "Prometheus's text format.", "content": content}} | error_responses()
