"""Complete FastAPI's document at `/openapi.json`.

Routes take their `responses` from here. Errors are described by making them, so the description cannot
differ from the reply. Forms and keys follow this server's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from asr_server.api.errors import response_to
from asr_server.api.limits import LIMIT_HEADERS, UNITS
from asr_server.api.middleware import DROPPED, IGNORED_FIELDS, MODEL_LIMIT, REQUEST_ID, TRACKS, TRUNCATED
from asr_server.api.models import ModelRegistry
from asr_server.api.schemas import (
    AudioFields,
    ErrorBody,
    TextDelta,
    TextDone,
    TranscriptionFields,
    TranslationFields,
)
from asr_server.config import Settings
from asr_server.errors import (
    AdminOff,
    AudioTooLong,
    AudioTooShort,
    DecodingUnavailable,
    EngineUnavailable,
    HeadersTooLarge,
    HostNotAllowed,
    InvalidApiKey,
    InvalidAudio,
    InvalidValue,
    ModelNotFound,
    NoSuchTrack,
    Overloaded,
    RateLimited,
    ReplicasEnded,
    ReportedError,
    RequestStalled,
    SampleRateTooHigh,
    ShuttingDown,
    StorageUnavailable,
    TooManyChannels,
    TooManyHeaders,
    TooSlow,
    UploadTooLarge,
)
from asr_server.formats.bodies import DiarizedJson, DiarizedSegment, Json, VerboseJson

Responses = dict[int | str, dict[str, Any]]

REF: Final = "#/components/schemas/{model}"
_HEADERS: Final[Mapping[str, str]] = {
    REQUEST_ID: "The request's id: the one that was sent, or a new one. The server's log names it.",
    MODEL_LIMIT: "What the embedded model cannot do; absent with any other model.",
    IGNORED_FIELDS: "The fields that were left out, where the server ignores unknown ones.",
    TRUNCATED: "`true`: the recording is damaged or cut short. A stream says it in its last event.",
    TRACKS: "The numbers of the audio tracks that were read, of a file that has several; not with a stream.",
    DROPPED: "How many segments that the model wrote are left out; not with a stream.",
    "retry-after": "Seconds to wait before the next try.",
    "retry-after-ms": "The same in milliseconds.",
    "www-authenticate": "How to send a key.",
    "x-should-retry": "`false`: another try would fail as well.",
    "connection": "`close`: this server is about to stop.",
    "x-accel-buffering": "With a stream `no`: a proxy is not to hold the events back.",
} | {
    f"x-ratelimit-{part}-{unit}": f"Of a key with a limit of {unit.replace('-', ' ')} a minute: {meaning}."
    for unit in UNITS
    for part, meaning in (
        ("limit", "that limit"),
        ("remaining", "how many are left"),
        ("reset", "the time until all are left again, such as `8.64s` or `6m0s`"),
    )
}


def reference(body: type) -> dict[str, str]:
    return {"$ref": REF.format(model=body.__name__)}


# -- Errors --------------------------------------------------------------------------------------------------

REQUEST_ERRORS: Final = (
    InvalidValue("Invalid HTTP request received."),
    TooSlow("No whole request within 10 seconds: --header-timeout-s (ASR_SERVER_HEADER_TIMEOUT_S)."),
    HeadersTooLarge(
        "The request's headers are larger than 65536 bytes: --max-header-bytes (ASR_SERVER_MAX_HEADER_BYTES)."
    ),
    TooManyHeaders("The request has more than 128 headers."),
    HostNotAllowed("The Host is not a name of this machine: --allowed-hosts (ASR_SERVER_ALLOWED_HOSTS)."),
    RuntimeError("a fault of the server"),
)
KEY_ERRORS: Final = (InvalidApiKey("Incorrect API key."),)
ADMIN_ERRORS: Final = (
    AdminOff(
        "This server loads and unloads no models on request: set --admin-key (ASR_SERVER_ADMIN_KEY), or "
        "'admin' in --keys-file (ASR_SERVER_KEYS_FILE)."
    ),
    InvalidValue("No checkpoint '/models/v3' is here.", "model"),
)
MODEL_ERRORS: Final = (ModelNotFound("The model 'whisper-9' does not exist. Served here: whisper-1."),)
ENGINE_ERRORS: Final = (EngineUnavailable("The engine is starting."), ShuttingDown())
UPLOAD_ERRORS: Final = (
    InvalidValue("Unknown field 'temprature'.", "temprature"),
    InvalidAudio("The file is empty."),
    NoSuchTrack("'track' asks for number 3; the file has 2 audio tracks (1: eng, 2: ger)."),
    AudioTooShort("The recording is shorter than 0.1 s."),
    SampleRateTooHigh(
        "The file's sample rate of 655350 Hz is over the limit of 384000 Hz, set by --max-sample-rate "
        "(ASR_SERVER_MAX_SAMPLE_RATE)."
    ),
    TooManyChannels(
        "The file's number of channels, 64, is over the limit of 32, set by --max-channels "
        "(ASR_SERVER_MAX_CHANNELS)."
    ),
    AudioTooLong("The recording is longer than 43200 s: --max-audio-s (ASR_SERVER_MAX_AUDIO_S)."),
    UploadTooLarge(
        "The file is larger than 1024 MiB, the most that this server takes (--max-upload-bytes "
        "(ASR_SERVER_MAX_UPLOAD_BYTES)). A compressed format, such as mp3 or opus, is smaller.",
        "file",
    ),
    Overloaded("256 requests are in flight.", retry_after_s=1.0),
    RateLimited(
        "Rate limit reached for the key 'web': 60 requests a minute ('requests_per_minute' in --keys-file "
        "(ASR_SERVER_KEYS_FILE)). Please try again in 1s.",
        retry_after_s=1.0,
    ),
    ReplicasEnded(4),
    RequestStalled("The request came to a standstill and was ended: nothing of it has moved for 60 s."),
    StorageUnavailable("The temporary folder is full."),
    DecodingUnavailable("The process that decoded the file was ended by the system."),
)


def error_responses(*errors: Exception) -> Responses:
    responses: Responses = {}
    for error in (*REQUEST_ERRORS, *errors):
        reply = response_to(error)
        entry = responses.setdefault(reply.status_code, _error_response(reply.status_code))
        entry["headers"] |= described_headers(*(name for name in reply.headers if name in _HEADERS))
        if isinstance(error, RateLimited):
            entry["headers"] |= described_headers(*LIMIT_HEADERS)
        examples = entry["content"]["application/json"]["examples"]
        examples[_example_name(error)] = {"value": msgspec.json.decode(bytes(reply.body))}
    return responses


def _error_response(status: int) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "headers": described_headers(REQUEST_ID),
        "content": {"application/json": {"schema": reference(ErrorBody), "examples": {}}},
    }


def _example_name(error: Exception) -> str:
    return error.code if isinstance(error, ReportedError) else "fault"


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
_TRANSLATED: Final = _VERBOSE | {"task": "translate"}
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
_TEXTS: Final[dict[str, tuple[str, Mapping[str, str]]]] = {
    "text/plain": (
        "`response_format` text or srt",
        {"text": "three one four", "srt": "1\n00:00:00,300 --> 00:00:02,100\nthree one four\n\n"},
    ),
    "text/vtt": (
        "`response_format` vtt",
        {"vtt": "WEBVTT\n\n00:00:00.300 --> 00:00:02.100\nthree one four\n\n"},
    ),
}
_FORMATS: Final[Mapping[type, str]] = {
    Json: "json",
    VerboseJson: "verbose_json",
    DiarizedJson: "diarized_json",
}


def transcription_responses() -> Responses:
    bodies: dict[type, Any] = {Json: _JSON, VerboseJson: _VERBOSE, DiarizedJson: _DIARIZED}
    meaning = (
        "`stream` true: each `data:` is a TextDelta (diarized_json: or a DiarizedSegment), then "
        "a TextDone, then `[DONE]`. An error after the first event is an ErrorBody."
    )
    return _transcript_responses(bodies, meaning)


def translation_responses() -> Responses:
    meaning = (
        "`stream` true: each `data:` is a TextDelta, then a TextDone, then `[DONE]`. An error after the "
        "first event is an ErrorBody."
    )
    return _transcript_responses({Json: _JSON, VerboseJson: _TRANSLATED}, meaning)


def _transcript_responses(bodies: Mapping[type, Any], stream_meaning: str) -> Responses:
    as_json = {
        "schema": {"anyOf": [reference(body) for body in bodies]},
        "examples": {_FORMATS[body]: {"value": example} for body, example in bodies.items()},
    }
    texts = {
        media_type: {
            "schema": {"type": "string", "description": meaning},
            "examples": {name: {"value": example} for name, example in examples.items()},
        }
        for media_type, (meaning, examples) in (
            _TEXTS | {"text/event-stream": (stream_meaning, {"stream": _EVENTS})}
        ).items()
    }
    transcript = {
        "description": "The transcript, in the form that was asked for.",
        "headers": described_headers(
            *(REQUEST_ID, MODEL_LIMIT, IGNORED_FIELDS, TRUNCATED, TRACKS, DROPPED, "x-accel-buffering"),
            *LIMIT_HEADERS,
        ),
        "content": {"application/json": as_json} | texts,
    }
    return {200: transcript} | error_responses(*KEY_ERRORS, *MODEL_ERRORS, *ENGINE_ERRORS, *UPLOAD_ERRORS)


def form_of(fields_type: type[AudioFields]) -> dict[str, Any]:
    content = {"multipart/form-data": {"schema": reference(fields_type)}}
    return {"requestBody": {"required": True, "content": content}}


# -- Operations ----------------------------------------------------------------------------------------------


def metrics_responses() -> Responses:
    content = {"text/plain": {"schema": {"type": "string"}, "example": "asr_ready 1.0\n"}}
    return {200: {"description": "Prometheus's text format.", "content": content}} | error_responses()


_DESCRIPTION: Final = (
    "OpenAI's audio API. Live audio is a WebSocket at `/v1/realtime?intent=transcription`, which OpenAPI "
    "cannot describe: it speaks OpenAI's realtime events. A path that is not here is answered 404, another "
    "method 405 with `Allow`, both with an ErrorBody."
)
_FILE: Final = {
    "type": "string",
    "format": "binary",
    "description": "The recording: wav, flac, mp3, ogg, opus, m4a, mp4, aac, webm, aiff. No name is needed.",
}


def install(
    app: FastAPI, settings: Settings, models: ModelRegistry, make_more_schemas: Callable[[], dict[str, Any]]
) -> None:
    """`make_more_schemas` returns those that routes of other folders refer to."""
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_document(app, settings, models, make_more_schemas()))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _document(
    app: FastAPI, settings: Settings, models: ModelRegistry, more_schemas: dict[str, Any]
) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=_DESCRIPTION,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # the framework's own; ours are 400
        schemas.pop(name, None)
    schemas |= _schemas() | more_schemas
    for fields_type in (TranscriptionFields, TranslationFields):
        schemas[fields_type.__name__], parts = _form(fields_type, settings, models)
        schemas |= parts
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(operation, has_key=path.startswith("/v1/"), settings=settings)
    return document


def _complete(operation: dict[str, Any], has_key: bool, settings: Settings) -> None:
    operation["responses"].pop("422", None)
    for response in operation["responses"].values():
        response["headers"] = described_headers(REQUEST_ID) | response.get("headers", {})
        for example in response["content"].get("application/json", {}).get("examples", {}).values():
            if error := example["value"].get("error"):  # the framework leaves out what is null
                error.update({"param": error.get("param"), "code": error.get("code")})
    if has_key and settings.asks_for_key:
        operation["security"] = [{"key": []}]


def _schemas() -> dict[str, Any]:
    bodies = (ErrorBody, Json, VerboseJson, DiarizedJson, TextDelta, DiarizedSegment, TextDone)
    _, generated = models_json_schema(
        [(body, "serialization") for body in bodies], ref_template=REF, schema_generator=_WithoutNull
    )
    schemas: dict[str, Any] = generated["$defs"]
    return schemas


def _form(
    fields_type: type[AudioFields], settings: Settings, models: ModelRegistry
) -> tuple[dict[str, Any], dict[str, Any]]:
    schema = fields_type.model_json_schema(ref_template=REF, schema_generator=_WithoutNull)
    parts: dict[str, Any] = schema.pop("$defs", {})
    schema["properties"] = {"file": _FILE} | schema["properties"]
    schema["properties"]["model"]["default"] = models.default.name
    if not models.take_any_name:
        schema["properties"]["model"]["enum"] = list(models.names)
    schema["required"] = ["file", *schema.get("required", [])]
    if "chunking_strategy" in schema["properties"]:
        as_object, _ = schema["properties"]["chunking_strategy"]["anyOf"]  # the other one is null
        schema["properties"]["chunking_strategy"]["anyOf"] = [{"const": "auto"}, as_object]
        del schema["properties"]["chunking_strategy"]["default"]  # null: absent
    if settings.unknown_fields == "ignore":
        schema["additionalProperties"] = True
    return schema, parts


class _WithoutNull(GenerateJsonSchema):
    """Remove null from schemas: bodies leave absent fields out."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner = schema["schema"]
        if schema.get("default", ...) is None and inner["type"] == "nullable":
            return self.generate_inner(inner["schema"])
        return super().default_schema(schema)
