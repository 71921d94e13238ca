"""Describe `/v1/realtime/client_secrets` for the OpenAPI document, which cannot describe a WebSocket."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from asr_server.annexes.realtime.server_events import ClientSecret, ClientSecretRequest
from asr_server.api.openapi import KEY_ERRORS, MODEL_ERRORS, Responses, error_responses, reference

CLIENT_SECRET_BODY: Final = {
    "requestBody": {"content": {"application/json": {"schema": reference(ClientSecretRequest)}}}
}


def client_secret_responses() -> Responses:
    secret = {
        "description": "The secret, and the session that it opens.",
        "content": {"application/json": {"schema": reference(ClientSecret)}},
    }
    return {200: secret} | error_responses(*KEY_ERRORS, *MODEL_ERRORS)


def schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(
        [ClientSecretRequest, ClientSecret], ref_template="#/components/schemas/{name}"
    )
    for schema in schemas.values():  # a tag is no field, and so has no description
        schema["properties"].get("type", {}).setdefault("description", "Which one it is.")
    return schemas
