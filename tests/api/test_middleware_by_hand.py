"""What is logged, counted and answered of each request and session, message by message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from asr_server import metrics
from asr_server.api import middleware
from asr_server.api.form import ReadingTurns
from asr_server.api.keys import Key
from asr_server.api.limits import Account
from asr_server.api.middleware import (
    LastErrorMiddleware,
    RequestLogMiddleware,
    UnreadBodyMiddleware,
    answer_headers,
    recording_headers,
    request_id_of,
)
from asr_server.config import Settings
from asr_server.core import DroppedSegment, Track, Transcript
from asr_server.telemetry import FIGURES, current_request_id
from tests.embedded import embedded
from tests.loop_clock import loop_clock

App = Callable[[Scope, Receive, Send], Awaitable[None]]
ROUTE = "/v1/audio/transcriptions"
START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}
END: dict[str, Any] = {"type": "http.response.body", "body": b"done"}


def scope_of(type: str = "http", **values: Any) -> Scope:
    headers = [(name.encode(), value.encode()) for name, value in values.pop("headers", {}).items()]
    scope = {"type": type, "method": "POST", "headers": headers, "client": ("10.0.0.1", 5)}
    return scope | {"raw_path": b"/there", "route": SimpleNamespace(path=ROUTE)} | values


class Wire:
    """Both ends of one request."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def answering(*messages: Message) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="asr_server.api.middleware")
    return caplog


def counted(route: str, status: str) -> float:
    value: float = metrics.requests.labels(route, status)._value.get()
    return value


def closed(code: str) -> float:
    value: float = metrics.realtime_closed.labels(code)._value.get()
    return value


# -- Requests --


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("a.Z:/9+=_-", True), ("a" * 128, True), ("a" * 129, False), ("", False), ("a b", False), ("ä", False)],
)
def test_an_id_of_sane_characters_is_kept(given: str, is_kept: bool) -> None:
    id = request_id_of(Headers({"x-request-id": given}))
    assert id == given if is_kept else id.startswith("req_")
    assert request_id_of(Headers({})) != request_id_of(Headers({}))


async def test_a_request_is_a_line_a_count_and_an_answer_with_its_id(log: pytest.LogCaptureFixture) -> None:
    answers: list[tuple[str, Mapping[str, Any]]] = []
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(current_request_id.get())
        await answering(START | {"status": 418, "headers": [(b"x-content-type-options", b"own")]}, END)(
            scope, receive, send
        )

    activity: Any = SimpleNamespace(add_answer=lambda id, figures: answers.append((id, figures)))
    before, wire, scope = counted(ROUTE, "418"), Wire(), scope_of(headers={"x-request-id": "mine"})
    await RequestLogMiddleware(app, activity=activity)(scope, wire.receive, wire.send)
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"x-request-id"] == b"mine"
    assert headers[b"x-content-type-options"] == b"own"
    assert b"default-src 'none'" in headers[b"content-security-policy"]
    assert (seen, scope["state"]["x-request-id"]) == (["mine"], "mine")
    assert "headers" not in wire.sent[1]
    assert counted(ROUTE, "418") == before + 1
    (line,) = log.records
    assert line.levelno == logging.INFO
    assert line.getMessage().startswith(f"POST {ROUTE}: 418 in 0.")
    wanted = {"route": ROUTE, "status": 418, "method": "POST", "client": "10.0.0.1"}
    assert getattr(line, FIGURES).items() >= wanted.items()
    assert 0 <= getattr(line, FIGURES)["seconds"] < 60
    assert answers == [("mine", getattr(line, FIGURES))]


@pytest.mark.parametrize(
    ("values", "line", "status", "level"),
    [
        ({}, f"POST {ROUTE}: 499", 499, logging.INFO),  # its client left before an answer
        ({"state": {"refused": 408}}, f"POST {ROUTE}: 408", 408, logging.INFO),
        ({"route": SimpleNamespace(path="/health")}, "POST /health: 499", 499, logging.DEBUG),
        ({"route": None}, "POST /there: 499", 499, logging.INFO),
        ({"route": None, "raw_path": b"/" + b"x" * 300}, f"POST /{'x' * 199}: 499", 499, logging.INFO),
    ],
)
async def test_a_request_without_an_answer_is_a_line_too(
    values: dict[str, Any], line: str, status: int, level: int, log: pytest.LogCaptureFixture
) -> None:
    route = getattr(values.get("route", SimpleNamespace(path=ROUTE)), "path", "other")
    before, wire = counted(route, str(status)), Wire()
    await RequestLogMiddleware(answering())(scope_of(**values), wire.receive, wire.send)
    (record,) = log.records
    assert record.getMessage().startswith(f"{line} in ")
    assert record.levelno == level
    assert counted(route, str(status)) == before + 1


async def test_a_server_that_is_not_ready_is_no_fault_of_it() -> None:
    before = {status: counted("/ready", status) for status in ("503", "not_ready")}
    wire, scope = Wire(), scope_of(method="GET", route=SimpleNamespace(path="/ready"))
    await RequestLogMiddleware(answering(START | {"status": 503}, END))(scope, wire.receive, wire.send)
    assert {status: counted("/ready", status) for status in before} == {
        "503": before["503"],
        "not_ready": before["not_ready"] + 1,
    }


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
async def test_requests_that_only_look_are_neither_traced_nor_shown(method: str) -> None:
    shown: list[str] = []
    ended: list[str] = []
    trace = SimpleNamespace(end=lambda name, figures: ended.append(name))
    traces: Any = SimpleNamespace(begin=lambda scope, stats: trace)
    activity: Any = SimpleNamespace(add_answer=lambda id, figures: shown.append(id))
    wire = Wire()
    middleware_of_all = RequestLogMiddleware(answering(START, END), traces=traces, activity=activity)
    await middleware_of_all(scope_of(method=method), wire.receive, wire.send)
    assert (len(shown), ended) == ((1, [f"POST {ROUTE}"]) if method == "POST" else (0, []))


@pytest.mark.parametrize(
    ("client", "address"),
    [
        *((("10.0.0.1", 5), "10.0.0.1"), (("fe80::1%eth0", 5), "fe80::1"), (None, "")),
        (("<script>", 5), ""),
    ],
)
async def test_a_clients_address_is_logged_if_it_is_one(
    client: tuple[str, int] | None, address: str, log: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    await RequestLogMiddleware(answering(START, END))(scope_of(client=client), wire.receive, wire.send)
    assert getattr(log.records[0], FIGURES).get("client", "") == address


def metered(account: Account | None, *messages: Message) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stats = metrics.current_request_stats()
        stats.account, stats.is_metered = account, True
        await answering(*messages)(scope, receive, send)

    return app


@pytest.mark.parametrize("is_metered", [True, False])
async def test_what_a_key_uses_is_counted_written_down_and_told_in_headers(is_metered: bool) -> None:
    account = Account(Key("web", "0" * 64, requests_per_minute=60))
    added: list[dict[str, Any]] = []
    usage: Any = SimpleNamespace(add=lambda stats, **outcome: added.append({"key": stats.key} | outcome))
    wire = Wire()
    app = metered(account, START | {"status": 201}, END) if is_metered else answering(START, END)
    await RequestLogMiddleware(app, usage)(scope_of(), wire.receive, wire.send)
    assert added == [{"key": "web", "status": 201}] * is_metered
    assert account.answers == ({201: 1} if is_metered else {})
    names = {name for name, _ in wire.sent[0]["headers"]}
    assert (b"x-ratelimit-limit-requests" in names) == is_metered
    nobodys = Wire()
    await RequestLogMiddleware(metered(None, START, END), usage)(scope_of(), nobodys.receive, nobodys.send)
    assert added[-1] == {"key": "", "status": 200}


# -- Sessions --

ACCEPT: dict[str, Any] = {"type": "websocket.accept", "headers": []}
LEFT: dict[str, Any] = {"type": "websocket.disconnect", "code": 4321}


def session(*sent: Message, reads: bool = False) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answering(*sent)(scope, receive, send)
        if reads:
            await receive()

    return app


@pytest.mark.parametrize(
    ("app", "messages", "line", "label"),
    [
        (session(ACCEPT, reads=True), [LEFT], "closed by the client with 4321", "other"),
        (session(ACCEPT), [{"type": "websocket.receive"}, LEFT], "closed by the client with 4321", "other"),
        (session(ACCEPT), [LEFT | {"code": 1015}], "closed by the client with 1015", "1015"),
        (session(ACCEPT), [LEFT | {"code": 1016}], "closed by the client with 1016", "other"),
        (session(ACCEPT), [{"type": "websocket.disconnect"}], "closed by the client with 1005", "1005"),
        (
            session(ACCEPT, {"type": "websocket.close", "code": 1000}),
            [],
            "closed by the server with 1000",
            "1000",
        ),
        (
            session(ACCEPT, {"type": "websocket.close", "code": 1012}, reads=True),
            [LEFT],
            "closed by the server with 1012",
            "1012",
        ),
        (session(ACCEPT), [], "closed by nobody with 1006", "1006"),
    ],
)
async def test_a_session_is_a_line_and_a_count_by_who_closed_it_first(
    app: App,
    messages: list[Message],
    line: str,
    label: str,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "LAST_MESSAGES_S", 0.001)
    added: list[dict[str, Any]] = []
    usage: Any = SimpleNamespace(add=lambda stats, **outcome: added.append(outcome))
    before, wire = closed(label), Wire(*messages)
    await RequestLogMiddleware(app, usage)(scope_of("websocket"), wire.receive, wire.send)
    assert dict(wire.sent[0]["headers"])[b"x-request-id"].startswith(b"req_")
    (record,) = log.records
    assert record.getMessage().startswith(f"WebSocket {ROUTE}: {line} after 0.")
    assert getattr(record, FIGURES)["close_code"] == int(line.rpartition(" ")[2])
    assert getattr(record, FIGURES)["client"] == "10.0.0.1"
    assert closed(label) == before + 1
    assert added == []  # it was not metered


async def test_a_metered_session_counts_as_a_switch_with_its_close_code() -> None:
    added: list[dict[str, Any]] = []
    ended: list[str] = []
    usage: Any = SimpleNamespace(add=lambda stats, **outcome: added.append(outcome))
    traces: Any = SimpleNamespace(
        begin=lambda scope, stats: SimpleNamespace(end=lambda name, figures: ended.append(name))
    )
    wire = Wire(LEFT)
    scope = scope_of("websocket")
    del scope["method"]
    await RequestLogMiddleware(metered(None, ACCEPT), usage, traces)(scope, wire.receive, wire.send)
    assert added == [{"status": 101, "close_code": 4321}]
    assert ended == [f"WebSocket {ROUTE}"]


async def test_a_handshake_that_is_refused_counts_as_a_request(log: pytest.LogCaptureFixture) -> None:
    refusal: Message = {"type": "websocket.http.response.start", "status": 403, "headers": []}
    added: list[dict[str, Any]] = []
    usage: Any = SimpleNamespace(add=lambda stats, **outcome: added.append(outcome))
    before, codes, wire = counted(ROUTE, "403"), closed("1006"), Wire()
    await RequestLogMiddleware(metered(None, refusal), usage)(scope_of("websocket"), wire.receive, wire.send)
    assert b"x-request-id" in dict(wire.sent[0]["headers"])
    assert log.messages[0].startswith(f"WebSocket {ROUTE}: 403 in 0.")
    assert (counted(ROUTE, "403"), closed("1006")) == (before + 1, codes)
    assert added == [{"status": 403}]


async def test_a_session_at_no_route_is_not_counted_by_its_code() -> None:
    before, wire = closed("other"), Wire(LEFT)
    scope = scope_of("websocket", route=None)
    await RequestLogMiddleware(session(ACCEPT))(scope, wire.receive, wire.send)
    assert closed("other") == before


async def test_the_life_of_the_server_is_no_request(log: pytest.LogCaptureFixture) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    wire = Wire()
    for wrapped in (
        RequestLogMiddleware(app),
        LastErrorMiddleware(app),
        UnreadBodyMiddleware(app, ReadingTurns()),
    ):
        await wrapped({"type": "lifespan", "headers": []}, wire.receive, wire.send)
    assert scopes == [{"type": "lifespan", "headers": []}] * 3
    assert log.records == []


# -- Errors --


def failing(error: BaseException, *before: Message) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answering(*before)(scope, receive, send)
        raise error

    return app


async def test_an_error_before_the_reply_is_a_500_and_behind_its_begin_ends_the_connection(
    log: pytest.LogCaptureFixture,
) -> None:
    wire = Wire()
    await LastErrorMiddleware(failing(ZeroDivisionError("secret")))(scope_of(), wire.receive, wire.send)
    assert wire.sent[0]["status"] == 500
    assert b"secret" not in wire.sent[1]["body"]
    wire = Wire()
    with pytest.raises(ZeroDivisionError):
        await LastErrorMiddleware(failing(ZeroDivisionError(), START))(scope_of(), wire.receive, wire.send)
    assert wire.sent == [START]
    assert [record.levelname for record in log.records] == ["ERROR"] * 2
    assert all(record.exc_info for record in log.records)
    assert log.messages == ["POST failed"] * 2


async def test_the_end_of_the_server_is_told_where_no_reply_has_begun(log: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    await LastErrorMiddleware(failing(asyncio.CancelledError()))(scope_of(), wire.receive, wire.send)
    assert wire.sent[0]["status"] == 503
    wire = Wire()
    await LastErrorMiddleware(failing(asyncio.CancelledError(), START))(scope_of(), wire.receive, wire.send)
    assert wire.sent == [START]
    assert log.records == []


async def test_an_error_of_a_session_is_its_own() -> None:
    wire = Wire()
    with pytest.raises(ZeroDivisionError):
        await LastErrorMiddleware(failing(ZeroDivisionError()))(
            scope_of("websocket"), wire.receive, wire.send
        )
    assert wire.sent == []


# -- Bodies that nobody read --


def part(body: bytes, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more_body}


async def discarded(headers: dict[str, str], *messages: Message, reads: int = 0) -> Wire:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(reads):
            await receive()
        await answering(START | {"headers": []}, END | {"more_body": True}, END)(scope, receive, send)

    wire = Wire(*messages)
    async with asyncio.timeout(60):
        await UnreadBodyMiddleware(app, ReadingTurns())(scope_of(headers=headers), wire.receive, wire.send)
    return wire


def shape(wire: Wire) -> list[tuple[bytes, bool]]:
    return [(message["body"], message.get("more_body", False)) for message in wire.sent[1:]]


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ({"content-length": "9"}, [part(b"abc"), part(b"def"), part(b"ghi", False)]),
        ({"transfer-encoding": "chunked"}, [part(b"abc"), part(b"", False)]),
        ({"content-length": "9"}, [part(b"abc"), {"type": "http.disconnect"}]),
    ],
)
async def test_the_rest_of_a_body_is_read_behind_the_whole_reply_which_says_close(
    headers: dict[str, str], messages: list[Message]
) -> None:
    wire = await discarded(headers, *messages, part(b"of the next request"))
    assert dict(wire.sent[0]["headers"]) == {b"connection": b"close"}
    assert shape(wire) == [(b"done", True), (b"done", True), (b"", False)]
    assert wire.messages == [part(b"of the next request")]


@pytest.mark.parametrize(
    ("headers", "messages", "reads"),
    [
        ({}, [part(b"abc")], 0),
        ({"content-length": "0"}, [part(b"abc")], 0),
        ({"content-length": "6"}, [part(b"abc"), part(b"def", False)], 2),
        ({"content-length": "6"}, [{"type": "http.disconnect"}], 1),
    ],
)
async def test_a_reply_behind_a_body_that_was_read_or_is_none_is_left_as_it_is(
    headers: dict[str, str], messages: list[Message], reads: int
) -> None:
    wire = await discarded(headers, *messages, reads=reads)
    assert wire.sent[0]["headers"] == []
    assert shape(wire) == [(b"done", True), (b"done", False)]


async def test_no_more_than_the_limit_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_DISCARDED_BYTES", 6)
    wire = await discarded({"content-length": "99"}, *[part(b"abc")] * 5)
    assert len(wire.messages) == 3


async def test_the_rest_of_a_body_is_waited_for_half_a_minute() -> None:
    with loop_clock() as clock:
        waiting = asyncio.create_task(discarded({"content-length": "9"}, part(b"abc")))
        await clock.advance(29.9)
        assert not waiting.done()
        await clock.advance(0.2)
        assert waiting.done()
    assert shape(await waiting)[-1] == (b"", False)


# -- Headers of answers --


def test_an_answer_names_the_limit_of_its_model_and_the_fields_that_were_ignored() -> None:
    assert answer_headers(embedded()) == {"x-model-limit": embedded().model_limit}
    assert answer_headers(Settings(model="/models/own")) == {}
    names = [f"näme[{number}] {'x' * 100}" for number in range(40)]
    (header,) = answer_headers(Settings(model="/models/own"), names).values()
    assert header.isascii()
    listed = header.split(", ")
    assert len(listed) == 32
    assert listed[1].startswith("n%C3%A4me[1]%20xxx")
    assert listed[1].count("x") == 72


def test_an_answer_tells_of_what_was_cut_chosen_and_dropped() -> None:
    plain = Transcript("one", (), (), "english", 1.0, 1, 1)
    assert recording_headers(plain) == {}
    tracks = (Track(1, "eng"), Track(3, "ger"))
    dropped = (DroppedSegment(0.0, 1.0, "thanks", "no_voice"),) * 2
    told = Transcript("one", (), (), "english", 1.0, 1, 1, is_cut_short=True, tracks=tracks, dropped=dropped)
    assert recording_headers(told) == {
        "x-truncated": "true",
        "x-audio-tracks": "1,3",
        "x-dropped-segments": "2",
    }
