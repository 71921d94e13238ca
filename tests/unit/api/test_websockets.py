"""WebSockets of clients that send frames without end, no handshake, or more behind the close."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from asr_server.annexes.realtime import session as session_module
from asr_server.annexes.realtime.client_events import MAX_MESSAGE_BYTES
from asr_server.protocols.websockets import MAX_FRAMES_AHEAD, BoundedWebSocketProtocol
from tests.support.embedded import embedded
from tests.support.fake_replica import noise
from tests.support.raw_client import RawClient
from tests.support.until import until
from tests.unit.api.figures import growth, read
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.realtime.realtime_client import MANUAL, open_session, pcm24

PATH = "/v1/realtime?intent=transcription"
MASK = bytes(4)
EMPTY_PING, EMPTY_PIECE = b"\x89\x80" + MASK, b"\x00\x80" + MASK
BEGUN_TEXT = b"\x01\x81" + MASK + b"{"
PIECE_OF_A_BYTE = b"\x00\x81" + MASK + b" "


def handshake(method: str = "GET", header: str = "authorization: Bearer s3cret") -> bytes:
    key = base64.b64encode(bytes(16)).decode()
    lines = [f"{method} {PATH} HTTP/1.1", "host: localhost", "connection: Upgrade", "upgrade: websocket"]
    lines += ["sec-websocket-version: 13", f"sec-websocket-key: {key}", header]
    return "\r\n".join([*lines, "", ""]).encode()


@asynccontextmanager
async def opened(app: RunningApp) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(app.host, app.port)
    try:
        client.send(handshake())
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101")
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    "frames",
    [EMPTY_PING * 400_000, BEGUN_TEXT + EMPTY_PIECE * 400_000, BEGUN_TEXT + PIECE_OF_A_BYTE * 400_000],
    ids=["pings", "empty pieces", "pieces of a byte"],
)
async def test_frames_without_end_are_parsed_for_a_moment_only(frames: bytes) -> None:
    """2.4 MB of them held the event loop for seconds."""
    async with run_app(embedded()) as app, opened(app) as client:
        await client.send_for_ever(frames, len(frames))
        assert await client.is_closed()
        await until(lambda: not app.server.server_state.connections)
        assert (await app.client.get("/health")).status_code == 200


@pytest.mark.slow
async def test_a_session_may_send_what_clients_send() -> None:
    """Small messages in a row, pings beside them, and a large message in many pieces."""
    async with (
        run_app(embedded(realtime_interim_s=0)) as app,
        open_session(app.url, ping_interval=0.01) as client,
    ):
        await client.update(**MANUAL)
        for _ in range(int(MAX_FRAMES_AHEAD)):
            await client.send({"type": "input_audio_buffer.clear"})
        audio = base64.b64encode(pcm24(noise(30.0))).decode()
        message = json.dumps({"type": "input_audio_buffer.append", "audio": audio})
        await client.socket.send(message[at : at + 100] for at in range(0, len(message), 100))
        await client.commit()
        await client.until(".completed")


async def test_frames_behind_a_handshake_without_a_key_are_not_parsed_on() -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        client = await RawClient.connect(app.host, app.port)
        client.send(handshake(header="x: y"))
        assert (await client.reply()).status == 401
        await client.send_for_ever(EMPTY_PING * 400_000, len(EMPTY_PING) * 400_000)
        assert await client.is_closed()
        await client.close()
        await until(lambda: not app.server.server_state.connections)


async def test_what_comes_behind_the_close_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_IDLE_S", 0.1)
    large = b"\x82\xff" + (1 << 20).to_bytes(8, "big") + MASK + bytes(1 << 20)
    async with run_app() as app, opened(app) as client:
        (connection,) = app.server.server_state.connections
        assert isinstance(connection, BoundedWebSocketProtocol)
        await until(lambda: connection.close_sent)
        num_sent = await client.send_for_ever(large, 100 * len(large))
        assert num_sent < 8 * MAX_MESSAGE_BYTES, "as much as one message, and what waits in the sockets"
        assert await client.is_closed()
        await until(lambda: not app.server.server_state.connections)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(handshake(header=f"x: {'y' * 9000}"), 431), (handshake(method="POST"), 400)],
    ids=["a line too long", "a POST"],
)
async def test_an_upgrade_that_is_no_handshake_is_refused(request_bytes: bytes, status: int) -> None:
    async with run_app(embedded()) as app:
        before = await read(app)
        client = await RawClient.connect(app.host, app.port)
        client.send(request_bytes)
        reply = await client.reply()
        assert (reply.status, reply.error["type"]) == (status, "invalid_request_error")
        assert reply.headers["x-request-id"]
        assert await client.is_closed()
        await client.close()
        after = await read(app)
        assert growth(before, after, f'asr_requests_total{{route="other",status="{status}"}}') == 1
        await app.client.aclose()
        await until(lambda: not app.server.server_state.connections)


async def test_who_reads_late_is_told_only_how_the_client_closed(app: RunningApp) -> None:
    came: list[dict[str, object]] = []
    may_read = asyncio.Event()

    @app.app.websocket("/late")
    async def late(socket: WebSocket) -> None:
        await socket.accept()
        await may_read.wait()
        came.append(dict(await socket.receive()))

    async with connect(f"ws://{app.host}:{app.port}/late", compression=None) as socket:
        (connection,) = (
            each for each in app.server.server_state.connections if isinstance(each, BoundedWebSocketProtocol)
        )
        await socket.send("unread")
        await until(lambda: connection.queue.qsize())
        connection.transport.resume_reading()
        await socket.close(4001, "enough")
    await until(lambda: connection not in app.server.server_state.connections)
    may_read.set()
    await until(lambda: came)
    assert came == [{"type": "websocket.disconnect", "code": 4001, "reason": "enough"}]
