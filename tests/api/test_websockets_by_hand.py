"""The bounds of a WebSocket's frames, to the frame and the byte, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from asr_server.api.websockets import BoundedWebSocketProtocol
from tests.api.hand_line import Line, Wire, settle
from tests.embedded import embedded
from tests.loop_clock import loop_clock

HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
MAX_SIZE = 1000


def ping(num_bytes: int = 0) -> bytes:
    length = [0x80 | num_bytes] if num_bytes < 126 else [0x80 | 126, *num_bytes.to_bytes(2, "big")]
    return bytes([0x82 if num_bytes > 125 else 0x89, *length]) + bytes(4 + num_bytes)


async def listening(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def closing(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close"})


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
    await send({"type": "websocket.http.response.body", "body": b"no"})


async def opened(app: ASGIApp = listening) -> tuple[BoundedWebSocketProtocol, Wire]:
    http, wire = Line(embedded(), app, ws_max_size=MAX_SIZE, ws_ping_interval=None).connect()
    http.data_received(HANDSHAKE)
    await settle()
    assert isinstance(wire.protocol, BoundedWebSocketProtocol)
    return wire.protocol, wire


async def test_so_many_small_frames_may_come_at_once_and_fifty_a_second_behind_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api.websockets")
    with loop_clock() as clock:
        socket, wire = await opened()
        socket.data_received(ping() * 1024)
        await clock.advance(1.0)
        socket.data_received(ping() * 50)
        assert not wire.was_aborted
        socket.data_received(ping())
        assert wire.was_aborted
        assert caplog.messages == ["closed the WebSocket of ('10.0.0.1', 4000): it sends without end"]


async def test_a_silence_is_no_credit_for_more_than_a_burst() -> None:
    with loop_clock() as clock:
        socket, wire = await opened()
        socket.data_received(ping() * 24)
        await clock.advance(3600.0)
        socket.data_received(ping())  # at which the silence counts
        socket.data_received(ping() * 1024)
        assert not wire.was_aborted
        socket.data_received(ping())
        assert wire.was_aborted


@pytest.mark.parametrize(("num_bytes", "num_more"), [(63, -1), (64, 0), (127, 0), (128, 1), (192, 2)])
async def test_a_frame_pays_for_itself_with_64_bytes_and_for_small_ones_with_more(
    num_bytes: int, num_more: int
) -> None:
    with loop_clock():
        socket, wire = await opened()
        socket.data_received(ping() * 1000)
        socket.data_received(ping(num_bytes))
        socket.data_received(ping() * (24 + num_more))
        assert not wire.was_aborted
        socket.data_received(ping())
        assert wire.was_aborted


@pytest.mark.parametrize(("num_bytes", "is_aborted"), [(MAX_SIZE, False), (MAX_SIZE + 1, True)])
async def test_as_much_as_one_message_may_come_behind_the_close(num_bytes: int, is_aborted: bool) -> None:
    socket, wire = await opened(closing)
    content = ping(125) * 9
    socket.data_received((content + content)[:num_bytes])
    assert wire.was_aborted == is_aborted


async def test_a_refusal_by_http_is_whole_and_no_handshake_that_was_left_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    socket, wire = await opened(refusing)
    assert wire.statuses == [401]
    assert wire.was_closed
    socket.connection_lost(None)
    await asyncio.sleep(0)
    assert caplog.messages == []


async def test_messages_that_nobody_read_are_let_go_of_with_the_connection() -> None:
    socket, _ = await opened()
    socket.queue.put_nowait({"type": "websocket.receive", "bytes": b"x"})
    socket.data_received(ping(100)[:50])
    socket.frames = [b"begun"]
    assert socket.conn.reader.buffer
    socket.connection_lost(None)
    assert socket.queue.get_nowait()["type"] == "websocket.disconnect"
    assert socket.queue.empty()
    assert socket.frames == []
    assert socket.conn.reader.buffer == bytearray()
