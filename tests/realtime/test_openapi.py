"""How client secrets are described; `tests/api/test_openapi.py` reads the whole document."""

from __future__ import annotations

from fastapi import FastAPI

from asr_server.api.errors import response_to
from asr_server.errors import InvalidApiKey, ModelNotFound
from asr_server.realtime.openapi import CLIENT_SECRET_BODY, client_secret_responses, schemas
from asr_server.realtime.route import router


def test_a_secret_is_answered_200_and_its_errors_are_described() -> None:
    responses = client_secret_responses()
    assert responses[200]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/ClientSecret"}}
    }
    for error in (InvalidApiKey("no"), ModelNotFound("no")):
        assert response_to(error).status_code in responses


def test_the_route_has_its_body_and_replies_in_the_document() -> None:
    app = FastAPI()
    app.include_router(router)
    post = app.openapi()["paths"]["/v1/realtime/client_secrets"]["post"]
    assert post["requestBody"]["content"] == CLIENT_SECRET_BODY["requestBody"]["content"]
    assert {int(status) for status in post["responses"]} == {*client_secret_responses()}


def test_each_field_is_described_and_each_reference_is_to_a_schema_that_is_there() -> None:
    described = schemas()
    for schema in described.values():
        for field, meaning in schema["properties"].items():
            assert meaning.get("description"), field
    text = str(described)
    names = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(described)
    assert {"ClientSecretRequest", "ClientSecret", "SessionVad"} <= set(described)
