"""What libraries refuse in plain text or by closing: ranges, preflights, WebSockets at unknown paths."""

from __future__ import annotations

import pytest

from tests.api.running_app import RunningApp, error_of, run_app
from tests.embedded import embedded
from tests.realtime.realtime_client import refused


@pytest.mark.parametrize(
    ("wanted", "status"), [("bytes=99999999-", 416), ("bytes=9-1", 400), ("lines=1", 400), ("x", 400)]
)
async def test_a_range_that_cannot_be_served_is_an_error_of_ours(
    app: RunningApp, wanted: str, status: int
) -> None:
    reply = await app.client.get("/", headers={"range": wanted})
    assert (reply.status_code, error_of(reply)["type"]) == (status, "invalid_request_error")
    assert reply.headers["x-request-id"]
    assert status == 400 or reply.headers["content-range"].startswith("bytes */")
    assert (await app.client.get("/", headers={"range": "bytes=0-1"})).status_code == 206


async def test_a_preflight_that_is_refused_is_an_error_of_ours() -> None:
    async with run_app(embedded(cors_origins="https://a.example")) as app:
        asked = {"origin": "https://b.example", "access-control-request-method": "POST"}
        reply = await app.client.options("/v1/models", headers=asked)
        assert (reply.status_code, error_of(reply)["message"]) == (400, "Disallowed CORS origin")
        allowed = await app.client.options("/v1/models", headers=asked | {"origin": "https://a.example"})
        assert (allowed.status_code, allowed.text) == (200, "OK")


async def test_a_websocket_at_an_unknown_path_is_an_error_of_ours(app: RunningApp) -> None:
    refusal = await refused(f"http://{app.host}:{app.port}", "/nowhere")
    assert (refusal.status, refusal.error["type"]) == (404, "invalid_request_error")
    assert refusal.headers["x-request-id"]
