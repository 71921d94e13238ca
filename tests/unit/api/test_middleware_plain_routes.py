"""Recordings are answered without FastAPI's routing, as FastAPI would answer them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi.routing import APIRoute

from asr_server.api.middleware import PlainRoutes
from asr_server.metrics import REGISTRY
from tests.support.embedded import embedded
from tests.unit.api.running_app import MODEL, SECOND, RunningApp, run_app
from tests.unit.realtime.realtime_client import refused

PATH = "/v1/audio/transcriptions"
KEY = {"authorization": "Bearer right"}
FILE = {"file": SECOND}


class Asked(NamedTuple):
    method: str = "POST"
    path: str = PATH
    headers: dict[str, str] = KEY
    data: dict[str, str] = MODEL
    files: dict[str, bytes] | None = FILE


REQUESTS = {
    "json": Asked(),
    "stream": Asked(data=MODEL | {"stream": "true"}),
    "translation": Asked(path="/v1/audio/translations"),
    "no key": Asked(headers={}),
    "wrong key": Asked(headers={"authorization": "Bearer wrong"}),
    "no form": Asked(files=None),
    "no audio": Asked(files={"file": b"no audio"}),
    "other model": Asked(data={"model": "other"}),
    "unknown field": Asked(data=MODEL | {"no_such_field": "1"}),
    "other method": Asked("GET"),
    "options": Asked("OPTIONS"),
    "slash": Asked(path=PATH + "/"),
    "nowhere": Asked(path=PATH + "x"),
    "behind a prefix": Asked(path="/prefix" + PATH),
}


@pytest.fixture(params=["", "/prefix"])
async def keyed(request: pytest.FixtureRequest) -> AsyncIterator[RunningApp]:
    settings = embedded(api_key="right", root_path=request.param)
    async with run_app(settings, languages=("en", "de")) as app:
        yield app


async def ask(app: RunningApp, asked: Asked) -> tuple[Any, ...]:
    """The reply, and for which routes it was counted."""
    before = counted()
    reply: httpx.Response = await app.client.request(
        asked.method, asked.path, headers=asked.headers, data=asked.data, files=asked.files
    )
    own = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
    assert reply.headers["x-request-id"]
    return (
        reply.status_code,
        own,
        reply.content,
        {key for key, n in counted().items() if n != before.get(key)},
    )


def counted() -> dict[tuple[str, str], float]:
    return {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "asr_requests_total"
    }


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_reply_is_the_one_that_fastapi_gives(
    keyed: RunningApp, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = REQUESTS[name]
    plain = await ask(keyed, asked)
    assert (plain[0] == 200) == (name in ("json", "stream", "translation", "slash"))
    monkeypatch.setattr(PlainRoutes, "_route_of", lambda self, scope: None)
    assert plain == await ask(keyed, asked)


async def test_a_recording_passes_no_route_of_fastapi(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: object) -> None:
        raise AssertionError("FastAPI's route was used")

    monkeypatch.setattr(APIRoute, "handle", fail)
    assert (await app.post()).status_code == 200
    assert (await app.client.get("/v1/models")).status_code == 500


@pytest.mark.parametrize("path", [PATH, "/v1/models", "/v1/models/whisper-1", "/health", "/docs", ""])
async def test_a_slash_at_the_end_of_a_path_changes_nothing(keyed: RunningApp, path: str) -> None:
    method, files = ("POST", FILE) if path == PATH else ("GET", None)
    status, _, _, counted_for = await ask(keyed, Asked(method, f"{path}/", files=files))
    assert status == 200
    assert not any("other" in str(key) for key in counted_for)


async def test_a_websocket_at_an_unknown_path_is_an_error_of_ours(app: RunningApp) -> None:
    refusal = await refused(f"http://{app.host}:{app.port}", "/nowhere")
    assert (refusal.status, refusal.error["type"]) == (404, "invalid_request_error")
    assert refusal.headers["x-request-id"]
