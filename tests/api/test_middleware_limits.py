"""How long and how much the middleware reads behind a reply or a session."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from asr_server.api.form import ReadingTurns
from asr_server.api.middleware import (
    RequestLogMiddleware,
    UnreadBodyMiddleware,
    report_request,
    report_session,
)
from asr_server.config import MIB
from asr_server.metrics import REGISTRY, RequestStats
from tests.api.test_middleware_by_hand import ACCEPT, END, START, Wire, answering, scope_of, session
from tests.loop_clock import loop_clock


class Large(bytes):
    """A piece of a body that says that it has half a gibibyte."""

    def __len__(self) -> int:
        return 512 * MIB


async def test_a_gibibyte_of_a_body_is_discarded() -> None:
    app = UnreadBodyMiddleware(answering(START | {"headers": []}, END), ReadingTurns())
    wire = Wire(*[{"type": "http.request", "body": Large(), "more_body": True} for _ in range(5)])
    await app(scope_of(headers={"transfer-encoding": "chunked"}), wire.receive, wire.send)
    assert len(wire.messages) == 3
    assert wire.sent[-1]["more_body"] is False


async def test_the_close_of_a_session_that_has_ended_is_waited_for_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="asr_server.api.middleware")
    wire = Wire()
    with loop_clock() as clock:
        app = RequestLogMiddleware(session(ACCEPT))
        ending = asyncio.create_task(app(scope_of("websocket"), wire.receive, wire.send))
        await clock.advance(0.9)
        assert not ending.done()
        await clock.advance(0.2)
        assert ending.done()
    assert "closed by nobody with 1006" in caplog.messages[0]


async def test_a_body_that_says_of_no_more_is_read() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answering(START | {"headers": []}, END)(scope, receive, send)

    wire = Wire({"type": "http.request", "body": b"abc"})
    scope = scope_of(headers={"content-length": "3"})
    await UnreadBodyMiddleware(app, ReadingTurns())(scope, wire.receive, wire.send)
    assert wire.sent == [START | {"headers": []}, END]


class Stats(RequestStats):
    def __init__(self) -> None:
        super().__init__()
        self.answered: list[str] = []

    def on_answered(self, route: str) -> None:
        self.answered.append(route)


def test_the_time_of_a_request_is_to_the_millisecond_and_its_speed_counts_if_it_was_answered() -> None:
    route, stats = "/of-a-test", Stats()
    for status in (200, 399, 400):
        assert report_request("GET", route, status, 1.23456, stats)["seconds"] == 1.235
    assert stats.answered == [route] * 2
    seconds = REGISTRY.get_sample_value("asr_request_seconds_sum", {"route": route})
    assert seconds == pytest.approx(3 * 1.23456)
    assert report_session("WebSocket", route, 1000, 1.23456, stats)["seconds"] == 1.235
