"""Complete FastAPI's document at `/openapi.json`, by this server's settings and the errors themselves."""

from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from asr_server import errors
from asr_server.api.models import Models
from asr_server.api.schemas import (
    HEADERS,
    LIMIT_HEADERS,
    REQUEST_ID,
    RETRY_AFTER,
    RETRY_AFTER_MS,
    SHOULD_RETRY,
    AudioFields,
    ErrorBody,
    TextDelta,
    TranscriptionFields,
    TranslationFields,
)
from asr_server.audio.decoder import RECORDING_FORMATS
from asr_server.errors import ReportedError
from asr_server.formats.render import (
    DiarizedJson,
    DiarizedSegment,
    Json,
    TextDone,
    VerboseJson,
)

Responses = dict[int | str, dict[str, Any]]

REF: Final = "#/components/schemas/{model}"
RETRY: Final = (RETRY_AFTER, RETRY_AFTER_MS, *LIMIT_HEADERS)
TRANSCRIPT_HEADERS: Final = tuple(name for name in HEADERS if name.startswith("x-") and name != SHOULD_RETRY)


def reference(body: type) -> dict[str, str]:
    return {"$ref": REF.format(model=body.__name__)}


REQUEST_ERRORS: Final[tuple[type[ReportedError], ...]] = (
    *(errors.InvalidValue, errors.TooSlow, errors.HeadersTooLarge, errors.TooManyHeaders),
    *(errors.HostNotAllowed, ReportedError),
)
RECORDING_ERRORS: Final = (
    *(errors.InvalidApiKey, errors.ModelNotFound, errors.EngineUnavailable),
    *(errors.InvalidAudio, errors.AudioTooShort, errors.AudioTooLong, errors.SampleRateTooHigh),
    *(errors.TooManyChannels, errors.UploadTooLarge, errors.Overloaded, errors.RateLimited),
    *(errors.ReplicasEnded, errors.RequestStalled, errors.StorageUnavailable, errors.DecodingUnavailable),
)


def error_responses(*kinds: type[ReportedError]) -> Responses:
    codes: dict[int, list[str]] = {}
    for kind in (*REQUEST_ERRORS, *kinds):
        codes.setdefault(kind.status, []).append(f"`{getattr(kind, 'code', None)}`")
    return {status: _error_response(status, names) for status, names in codes.items()}


def _error_response(status: int, codes: list[str]) -> dict[str, Any]:
    is_passing = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
        "headers": described_headers(*(RETRY if is_passing else ())),
        "content": {"application/json": {"schema": reference(ErrorBody)}},
    }


def described_headers(*names: str) -> dict[str, Any]:
    return {name: {"description": HEADERS[name], "schema": {"type": "string"}} for name in names}


_MEDIA_TYPES: Final = {
    "text/plain": "`response_format` text or srt.",
    "text/vtt": "`response_format` vtt.",
    "text/event-stream": "`stream` true: each `data:` is a TextDelta{segments}, then a TextDone, "
    "then `[DONE]`. An error after the first event is an ErrorBody.",
}


def transcript_responses(*bodies: type) -> Responses:
    segments = " (diarized_json: or a DiarizedSegment)" if DiarizedJson in bodies else ""
    texts = {
        media_type: {"schema": {"type": "string", "description": meaning.format(segments=segments)}}
        for media_type, meaning in _MEDIA_TYPES.items()
    }
    transcript = {
        "description": "The transcript, in the form that was asked for.",
        "headers": described_headers(*TRANSCRIPT_HEADERS),
        "content": {"application/json": {"schema": {"anyOf": list(map(reference, bodies))}}} | texts,
    }
    return {200: transcript} | error_responses(*RECORDING_ERRORS)


def form_of(fields_type: type[AudioFields]) -> dict[str, Any]:
    content = {"multipart/form-data": {"schema": reference(fields_type)}}
    return {"requestBody": {"required": True, "content": content}}


def metrics_responses() -> Responses:
    content = {"text/plain": {"schema": {"type": "string"}, "example": "asr_ready 1.0\n"}}
    return {200: {"description": "Prometheus's text format.", "content": content}} | error_responses()


_DESCRIPTION: Final = (
    "OpenAI's audio API. Live audio is a WebSocket at `/v1/realtime?intent=transcription`, which OpenAPI "
    "cannot describe: it speaks OpenAI's realtime events. A path that is not here is answered 404, another "
    "method 405 with `Allow`, both with an ErrorBody."
)
FILE_SCHEMA: Final = {
    "type": "string",
    "format": "binary",
    "description": f"The recording: {RECORDING_FORMATS}. No name is needed.",
}


def document_of(app: FastAPI, models: Models, asks_for_key: bool) -> dict[str, Any]:
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
    bodies = (ErrorBody, Json, VerboseJson, DiarizedJson, TextDelta, DiarizedSegment, TextDone)
    _, generated = models_json_schema(
        [(body, "serialization") for body in bodies], ref_template=REF, schema_generator=_WithoutNull
    )
    schemas |= generated["$defs"]
    for fields_type in (TranscriptionFields, TranslationFields):
        schemas[fields_type.__name__], parts = _form(fields_type, models)
        schemas |= parts
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for response in operation["responses"].values():
                response["headers"] = described_headers(REQUEST_ID) | response.get("headers", {})
            if asks_for_key and path.startswith("/v1/"):
                operation["security"] = [{"key": []}]
    return document


def _form(fields_type: type[AudioFields], models: Models) -> tuple[dict[str, Any], dict[str, Any]]:
    schema = fields_type.model_json_schema(ref_template=REF, schema_generator=_WithoutNull)
    parts: dict[str, Any] = schema.pop("$defs", {})
    schema["properties"] = {"file": FILE_SCHEMA} | schema["properties"]
    schema["properties"]["model"]["default"] = models.default.name
    if not any(model.settings.takes_any_name for model in models):
        schema["properties"]["model"]["enum"] = list(models.names)
    schema["required"] = ["file", *schema.get("required", [])]
    if models.default.settings.unknown_fields == "ignore":
        schema["additionalProperties"] = True
    return schema, parts


class _WithoutNull(GenerateJsonSchema):
    """Remove null from schemas: bodies leave absent fields out."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner = schema["schema"]
        if schema.get("default", ...) is None and inner["type"] == "nullable":
            return self.generate_inner(inner["schema"])
        return super().default_schema(schema)
