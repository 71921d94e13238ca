"""What libraries refuse in plain text or by closing: ranges, preflights, WebSockets at unknown paths."""

from __future__ import annotations

import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from asr_server.api.plain_errors import PlainErrors
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


# -- Message by message --

PLAIN = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"3"), (b"allow", b"GET")]


async def through(scope_type: str, *messages: Message) -> list[Message]:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope = {
        "type": scope_type,
        "path": "/",
        "raw_path": b"/",
        "headers": [],
        "extensions": {"websocket.http.response": {}},
    }
    await PlainErrors(app)(scope, receive, send)
    return sent


def start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


@pytest.mark.parametrize(
    ("status", "parts", "message"),
    [
        (
            400,
            [
                body(b"no "),
            ],
            "no ",
        ),
        (416, [body(b"not ", True), body(b"here")], "not here"),
        (405, [body(b"")], "Method Not Allowed"),
    ],
)
async def test_a_plain_error_is_ours_with_its_other_headers(
    status: int, parts: list[Message], message: str
) -> None:
    first, second = await through("http", start(status, PLAIN), *parts)
    headers = dict(first["headers"])
    assert (first["status"], headers[b"content-type"], headers[b"allow"]) == (
        status,
        b"application/json",
        b"GET",
    )
    assert headers[b"content-length"] == str(len(second["body"])).encode()
    assert json.loads(second["body"])["error"]["message"] == message


@pytest.mark.parametrize(
    "messages",
    [
        [start(399, PLAIN), body(b"abc")],
        [start(400, [(b"content-type", b"application/json")]), body(b"{}")],
        [start(500, []), body(b"a", True), body(b"b")],
    ],
)
async def test_other_replies_are_left_as_they_are(messages: list[Message]) -> None:
    assert await through("http", *messages) == messages


async def test_a_close_before_anything_else_is_a_404_and_a_later_one_a_close() -> None:
    close: Message = {"type": "websocket.close", "code": 1000}
    accept: Message = {"type": "websocket.accept"}
    refused = await through("websocket", close)
    assert (refused[0]["type"], refused[0]["status"]) == ("websocket.http.response.start", 404)
    assert b"There is no / here." in refused[1]["body"]
    assert await through("websocket", accept, close) == [accept, close]
    assert await through("lifespan", close) == [close]
