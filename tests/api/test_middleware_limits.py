"""How long and how much the middleware reads behind a reply or a session."""

from __future__ import annotations

import asyncio

import pytest

from asr_server.api.form import ReadingTurns
from asr_server.api.middleware import RequestLogMiddleware, UnreadBodyMiddleware
from asr_server.config import MIB
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
