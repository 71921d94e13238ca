"""The document at `/openapi.json` against the routes and their real replies."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from asr_server.api.schemas import SAFE_HEADERS
from tests.support.embedded import embedded
from tests.toolchain.deploy.tools import run_tool
from tests.unit.api.running_app import RunningApp, run_app

TRANSCRIPTIONS = "/v1/audio/transcriptions"


async def document_of(app: RunningApp) -> dict[str, Any]:
    document: dict[str, Any] = (await app.client.get("/openapi.json")).json()
    return document


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.slow
async def test_it_is_a_valid_document_of_its_version(tmp_path: Path) -> None:
    path = tmp_path / "openapi.json"
    async with run_app(embedded()) as app:
        path.write_text(json.dumps(await document_of(app)))
    assert run_tool("openapi-spec-validator", path).strip() == f"{path}: OK"


def conforms(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """As far as this document uses JSON Schema; an object has no field that is not described."""
    if "$ref" in schema:
        return conforms(value, document["components"]["schemas"][schema["$ref"].split("/")[-1]], document)
    if "anyOf" in schema:
        return any(conforms(value, each, document) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "object":
            if not isinstance(value, dict):
                return False
            if "properties" not in schema:  # names of any kind
                return all(conforms(e, schema["additionalProperties"], document) for e in value.values())
            known = schema["properties"]
            return set(schema.get("required", ())) <= value.keys() <= known.keys() and all(
                conforms(entry, known[name], document) for name, entry in value.items()
            )
        case "array":
            return isinstance(value, list) and all(conforms(e, schema["items"], document) for e in value)
    types = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}
    return isinstance(value, types[schema["type"]])


async def test_the_document_has_every_route_and_no_other(app: RunningApp) -> None:
    real = set()
    pending = list(app.app.routes)
    for route in pending:
        pending += getattr(getattr(route, "original_router", None), "routes", [])
        if isinstance(route, APIRoute) and route.include_in_schema:
            real |= {(method.lower(), route.path.replace(":path", "")) for method in route.methods or ()}
    described = {(method, path) for method, path, _ in operations(await document_of(app))}
    assert ("post", TRANSCRIPTIONS) in real
    assert described == real


async def test_everything_has_a_description(app: RunningApp) -> None:
    document = await document_of(app)
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            assert about.get("description"), f"{name}.{field}"
    for _, path, operation in operations(document):
        assert operation["description"], path
        assert "422" not in operation["responses"]
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], path
    assert "ValidationError" not in json.dumps(document)


async def test_every_reference_leads_somewhere(app: RunningApp) -> None:
    document = await document_of(app)
    text = json.dumps(document)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]


async def test_every_default_is_of_its_schema(app: RunningApp) -> None:
    document = await document_of(app)
    num_defaults = 0
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            if "default" in about:
                num_defaults += 1
                assert conforms(about["default"], about, document), f"{name}.{field}"
    assert num_defaults > 30


async def test_real_replies_are_of_the_document(app: RunningApp) -> None:
    document = await document_of(app)
    everything = {"response_format": "verbose_json", "timestamp_granularities[]": "word,segment"}
    post, get = app.client.post, app.client.get
    replies = {
        (f"get {path}", await get(path))
        for path in ("/health", "/ping", "/ready", "/version", "/load", "/metrics", "/v1/models")
    } | {
        ("get /v1/models/{name}", await get("/v1/models/whisper-1")),
        ("get /v1/models/{name}", await get("/v1/models/nobody")),
        *[
            (f"post {TRANSCRIPTIONS}", await app.post(response_format=f))
            for f in ("json", "text", "srt", "vtt")
        ],
        (f"post {TRANSCRIPTIONS}", await app.post(**everything)),
        (f"post {TRANSCRIPTIONS}", await app.post(**{"include[]": "logprobs"})),
        (f"post {TRANSCRIPTIONS}", await app.post(stream="true")),
        (f"post {TRANSCRIPTIONS}", await app.post(b"no audio")),
        (f"post {TRANSCRIPTIONS}", await app.post(model="nobody")),
        (f"post {TRANSCRIPTIONS}", await post(TRANSCRIPTIONS, json={})),
        ("post /v1/audio/translations", await app.post(path="/v1/audio/translations")),
    }
    for operation, reply in replies:
        check(operation, reply, document)


async def test_the_replies_to_other_paths_and_methods_are_described(app: RunningApp) -> None:
    document = await document_of(app)
    for reply in (await app.client.get("/nowhere"), await app.client.delete("/health")):
        assert conforms(reply.json(), {"$ref": "ErrorBody"}, document)
        assert f"{reply.status_code}" in document["info"]["description"]


async def test_translations_offer_and_answer_no_speakers(app: RunningApp) -> None:
    document = await document_of(app)
    operation = document["paths"]["/v1/audio/translations"]["post"]
    assert "iarized" not in json.dumps(operation)
    formats = document["components"]["schemas"]["TranslationFields"]["properties"]["response_format"]["enum"]
    assert "diarized_json" not in formats
    assert "verbose_json" in formats
    async with run_app(languages=("en", "de")) as other:
        reply = await other.post(path="/v1/audio/translations", response_format="diarized_json")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")


def check(operation: str, reply: httpx.Response, document: dict[str, Any]) -> None:
    method, path = operation.split()
    described = document["paths"][path][method]["responses"][str(reply.status_code)]
    assert "x-request-id" in described["headers"]
    own = {name for name in reply.headers if name.startswith("x-")} - SAFE_HEADERS.keys()
    assert own <= described["headers"].keys(), (operation, own)
    media_type = reply.headers["content-type"].partition(";")[0]
    schema = described["content"][media_type]["schema"]
    if media_type == "application/json":
        assert conforms(reply.json(), schema, document), (operation, reply.text)


async def test_the_fields_described_are_taken(app: RunningApp) -> None:
    document = await document_of(app)
    schema = document["components"]["schemas"]["TranscriptionFields"]
    assert schema["properties"]["model"]["enum"][:2] == ["whisper-digits", "whisper-1"]
    assert schema["required"] == ["file"]
    for name, about in schema["properties"].items():
        if "default" in about and name not in ("response_format",):
            value = about["default"]
            sent = json.dumps(value) if not isinstance(value, str) else value
            reply = await app.post(**({} if sent in ("[]", "null") else {name: sent}))
            assert reply.status_code == 200, (name, reply.text)


@pytest.mark.parametrize("api_key", ["", "s3cret"])
async def test_the_key_is_described_where_one_is_asked_for(api_key: str) -> None:
    async with run_app(embedded(api_key=api_key, unknown_fields="ignore")) as app:
        document = await document_of(app)
        for _, path, operation in operations(document):
            assert ("security" in operation) == bool(api_key and path.startswith("/v1/"))
        assert document["components"]["schemas"]["TranscriptionFields"]["additionalProperties"] is True


def test_the_check_of_these_tests_can_fail() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert conforms({"a": 1}, schema, {})
    for wrong in ({}, {"a": "1"}, {"a": 1, "b": 2}):
        assert not conforms(wrong, schema, {})


async def test_jobs_are_described_where_the_server_keeps_them(tmp_path: Path) -> None:
    async with run_app(embedded(jobs_dir=str(tmp_path))) as app:
        assert "/v1/audio/transcriptions/{id}" in (await document_of(app))["paths"]
        await test_the_document_has_every_route_and_no_other(app)
        await test_everything_has_a_description(app)
        await test_every_reference_leads_somewhere(app)
