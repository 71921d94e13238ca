"""The document at `/openapi.json`: what the framework finds in the routes, completed.

The replies of each route come from `openapi_replies`; the forms, the bodies and the key are added here, as
this server has them: the names of its model, whether it asks for a key, whether it refuses unknown fields.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from asr_server.api.openapi_replies import REF, described_headers
from asr_server.api.realtime.schemas import ClientSecret, ClientSecretRequest
from asr_server.api.request_id import REQUEST_ID
from asr_server.api.schemas import (
    AudioFields,
    ErrorBody,
    TextDelta,
    TextDone,
    TranscriptionFields,
    TranslationFields,
)
from asr_server.config import Settings
from asr_server.formats.bodies import DiarizedJson, DiarizedSegment, Json, VerboseJson

_DESCRIPTION: Final = (
    "OpenAI's audio API. Live audio is a WebSocket at `/v1/realtime?intent=transcription`, which OpenAPI "
    "cannot describe: it speaks OpenAI's realtime events."
)
_FILE: Final = {
    "type": "string",
    "format": "binary",
    "description": "The recording: wav, flac, mp3, ogg, opus, m4a, mp4, aac, webm, aiff. No name is needed.",
}


def install(app: FastAPI, settings: Settings) -> None:
    """The application's document, which says what this server serves."""
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_document(app, settings))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, settings: Settings) -> dict[str, Any]:
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
    schemas |= _schemas()
    for fields_type in (TranscriptionFields, TranslationFields):
        schemas[fields_type.__name__], parts = _form(fields_type, settings)
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
        for content in response["content"].values():
            for example in content.get("examples", {}).values():
                if error := example["value"].get("error"):  # the framework leaves out what is null
                    error.update({"param": error.get("param"), "code": error.get("code")})
    if has_key and (settings.api_key or settings.api_key_file):
        operation["security"] = [{"key": []}]


def _schemas() -> dict[str, Any]:
    bodies = (ErrorBody, Json, VerboseJson, DiarizedJson, TextDelta, DiarizedSegment, TextDone)
    _, generated = models_json_schema(
        [(body, "serialization") for body in bodies], ref_template=REF, schema_generator=_WithoutNull
    )
    _, of_msgspec = msgspec.json.schema_components(
        [ClientSecretRequest, ClientSecret], ref_template="#/components/schemas/{name}"
    )
    for schema in of_msgspec.values():  # a tag is no field, and so has no description
        schema["properties"].get("type", {}).setdefault("description", "Which one it is.")
    schemas: dict[str, Any] = generated["$defs"] | of_msgspec
    return schemas


def _form(fields_type: type[AudioFields], settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The form, and the parts that it refers to."""
    schema = fields_type.model_json_schema(ref_template=REF, schema_generator=_WithoutNull)
    parts: dict[str, Any] = schema.pop("$defs", {})
    schema["properties"] = {"file": _FILE} | schema["properties"]
    schema["properties"]["model"]["enum"] = list(settings.model_names)
    schema["required"] = ["file", *schema["required"]]
    if "chunking_strategy" in schema["properties"]:
        as_object, _ = schema["properties"]["chunking_strategy"]["anyOf"]  # the other one is null
        schema["properties"]["chunking_strategy"]["anyOf"] = [{"const": "auto"}, as_object]
    if settings.unknown_fields == "ignore":
        schema["additionalProperties"] = True
    return schema, parts


class _WithoutNull(GenerateJsonSchema):
    """A field whose default is None is left out where there is nothing: it is never null."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner = schema["schema"]
        if schema.get("default", ...) is None and inner["type"] == "nullable":
            return self.generate_inner(inner["schema"])
        return super().default_schema(schema)
