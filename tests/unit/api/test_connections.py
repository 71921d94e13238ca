"""Clients that send too much, too slowly or nothing, and clients that do not read their replies."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from asr_server.config import MIB
from asr_server.protocols import http as protocol_module
from asr_server.protocols.http import Waiting
from asr_server.telemetry import TextFormatter
from tests.support.embedded import embedded
from tests.support.raw_client import FILE_PART, MULTIPART, RawClient
from tests.support.until import until
from tests.unit.api.figures import growth, read
from tests.unit.api.running_app import SECOND, RunningApp, run_app

pytestmark = pytest.mark.slow

TICK_S = 0.02
STRICT = embedded(client_grace_s=0.3, keep_alive_s=1)
Connect = Callable[..., Awaitable[RawClient]]
BIG = "x" * (12 * MIB)  # more than the system's buffers take


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "TICK_S", TICK_S)
    monkeypatch.setattr(protocol_module, "MAX_HEADER_BYTES", 4096)


@asynccontextmanager
async def strict_app(**changes: Any) -> AsyncIterator[RunningApp]:
    async with run_app(replace(STRICT, **changes)) as app:

        @app.app.get("/big")
        async def big() -> PlainTextResponse:
            return PlainTextResponse(BIG)

        yield app


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    clients: list[RawClient] = []

    async def connect(app: RunningApp, receive_buffer: int = 0) -> RawClient:
        clients.append(await RawClient.connect(app.host, app.port, receive_buffer))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


def num_connections(app: RunningApp) -> int:
    return len(app.server.server_state.connections)


# -- Headers --


async def test_a_header_without_end_is_refused_at_the_limit(connect: Connect) -> None:
    async with strict_app() as app:
        client = await connect(app)
        client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-endless: ")
        num_sent = await client.send_for_ever(b"a" * 65536, 150 * MIB)
        assert num_sent < 150 * MIB
        assert await client.is_closed()
        assert await app.still_works()


BEGIN = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
GET = BEGIN + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        (BEGIN + b"x-long: " + b"a" * 4096, 431, "4096 bytes"),
        (BEGIN + b"x: y\r\n" * 200 + b"\r\n", 431, "more than"),
        (BEGIN + b"x: y\r\n" * 100 + b"\r\n", 200, ""),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (BEGIN + b"Host: localhost\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.0\r\n\r\n", 200, ""),
    ],
)
async def test_headers_are_bounded_and_name_one_host(
    connect: Connect, sent: bytes, status: int, told: str
) -> None:
    async with strict_app() as app:
        client = await connect(app)
        client.send(sent)
        reply = await client.reply()
        assert reply.status == status
        assert reply.headers["x-request-id"]
        assert status == 200 or told in reply.error["message"]
        assert status != 431 or await client.is_closed()


@pytest.mark.parametrize("begin", [RawClient.begin_upload, lambda client: client.send(BEGIN)])
async def test_headers_and_bodies_that_trickle_are_given_up(
    connect: Connect, begin: Callable[[RawClient], object]
) -> None:
    async with strict_app() as app:
        client = await connect(app)
        begin(client)
        reply = asyncio.create_task(client.reply())
        while not reply.done():
            client.send(b"x: y\r\n")  # 300 bytes a second at most
            await asyncio.sleep(TICK_S)
        assert (await reply).status == 408
        assert await client.is_closed()


async def test_a_connection_that_never_sends_a_request_is_closed(connect: Connect) -> None:
    async with strict_app() as app:
        client = await connect(app)
        assert await client.is_closed()
        await until(lambda: not num_connections(app))


async def test_what_is_not_http_is_400_with_the_usual_body_and_one_line_with_its_id(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(TextFormatter("api"))
    async with strict_app() as app:
        client = await connect(app)
        client.send(b"\x16\x03\x01 hello\r\n\r\n")
        reply = await client.reply()
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    (line,) = [line for line in caplog.text.splitlines() if "Invalid HTTP" in line]
    assert reply.headers["x-request-id"] in line


@pytest.mark.parametrize(
    ("behind", "num_served", "status"),
    [
        *((GET * 9, 8, 400), (GET * 2 + b"\x16\x03\x01 hello\r\n\r\n", 2, 400)),
        (GET + b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 200, 1, 431),
    ],
    ids=["one too many", "no HTTP", "too many headers"],
)
async def test_the_replies_to_requests_before_one_that_is_refused_are_sent(
    connect: Connect, caplog: pytest.LogCaptureFixture, behind: bytes, num_served: int, status: int
) -> None:
    route = "/v1/audio/transcriptions"
    async with strict_app() as app:
        app.replica.holding = True
        before = await read(app)
        client = await connect(app)
        part = FILE_PART + SECOND + b"\r\n--limit--\r\n"
        head = b"POST %s HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n"
        client.send(head % (route.encode(), MULTIPART, len(part)) + part)
        await until(lambda: app.replica.held)
        client.send(behind)
        for _ in range(10):
            assert (await app.client.get("/version")).status_code == 200
        app.replica.release(app.replica.held[0])
        assert b'"text":"zero"' in (await client.reply()).body
        served = [(await client.reply()).status for _ in range(num_served)]
        assert served == [200] * num_served
        assert (await client.reply()).status == status
        assert await client.is_closed()
        after = await read(app)
    assert growth(before, after, f'asr_requests_total{{route="{route}",status="200"}}') == 1
    assert growth(before, after, 'asr_requests_total{route="/health",status="200"}') == num_served
    assert growth(before, after, f'asr_requests_total{{route="other",status="{status}"}}') == 1
    assert "Traceback" not in caplog.text


async def test_a_body_that_is_refused_lets_the_replies_before_it_be_sent(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with strict_app() as app:
        client = await connect(app)
        client.send(GET * 2 + CHUNKED + MULTIPART + b"\r\nno size\r\n")
        assert [(await client.reply()).status for _ in range(3)] == [200, 200, 400]
        assert await client.is_closed()
        assert await app.still_works()
    assert "Traceback" not in caplog.text


# -- Bodies --


async def test_an_upload_given_up_is_logged_and_counted_as_408_with_the_id_that_its_reply_has(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(TextFormatter("api"))
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger("asr_server").addHandler(handler)
    counted = 'asr_requests_total{route="/v1/audio/transcriptions",status="408"}'
    async with strict_app() as app:
        before = await read(app)
        client = await connect(app)
        client.begin_upload()
        reply = await client.reply()
        assert await client.is_closed()
        await until(lambda: not app.server.server_state.tasks)
        after = await read(app)
    logging.getLogger("asr_server").removeHandler(handler)
    assert all(name in reply.error["message"] for name in ("1000 bytes a second", "--client-grace-s"))
    assert growth(before, after, counted) == 1
    told = [line for line in lines if reply.headers["x-request-id"] in line]
    assert ["closed the connection" in told[0], "POST /v1/audio/transcriptions: 408" in told[1]] == [True] * 2


async def test_a_slow_body_above_the_minimum_rate_is_read_to_its_end(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_module, "MIN_BYTES_PER_S", 100.0)
    async with strict_app() as app:
        client = await connect(app)
        pieces = [b"x" * 50] * 40  # in a second and more, which is three times the grace
        client.begin_upload(len(FILE_PART) + 40 * 50)
        for piece in pieces:
            client.send(piece)
            await asyncio.sleep(0.03)
        assert (await client.reply()).status == 400  # no audio, and no closing boundary: but it was read


async def test_a_pause_of_the_server_itself_makes_no_client_slow(connect: Connect) -> None:
    async with strict_app() as app:
        client = await connect(app)
        client.begin_upload(len(FILE_PART) + 8)
        await until(lambda: num_connections(app))
        time.sleep(3 * STRICT.client_grace_s)  # noqa: ASYNC251  the event loop stands still
        client.send(b"12345678")
        assert (await client.reply()).status == 400


async def test_the_time_a_request_is_worked_on_is_not_counted_as_the_client_s() -> None:
    async with strict_app() as app:
        app.replica.holding = True
        reply = asyncio.create_task(app.post())
        await until(lambda: app.replica.held)
        await asyncio.sleep(3 * STRICT.client_grace_s)
        app.replica.release(app.replica.held[0])
        assert (await reply).status_code == 200


CHUNKED = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"


ENDLESS = {
    "trailers": (b"\r\n0\r\nx: ", b"y" * (1 << 16)),
    "extensions": (b"\r\n1;x=", b"y" * (1 << 16)),
    "smallest chunks": (
        MULTIPART + b"\r\n%x\r\n%s\r\n" % (len(FILE_PART), FILE_PART),
        b"1\r\nx\r\n" * 10_000,
    ),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_what_frames_a_body_without_end_is_refused(connect: Connect, kind: str) -> None:
    begin, more = ENDLESS[kind]
    async with strict_app() as app:
        client = await connect(app)
        client.send(CHUNKED + begin)
        assert await client.send_for_ever(more, 1 << 26) < 1 << 25
        await until(lambda: not num_connections(app))


async def test_a_trailer_is_no_header(connect: Connect) -> None:
    async with strict_app(api_key="s3cret") as app:
        client = await connect(app)
        client.send(CHUNKED + MULTIPART + b"\r\n")
        part = FILE_PART + SECOND + b"\r\n--limit--\r\n"
        client.send(b"%x\r\n%s\r\n" % (len(part), part))
        client.send(b"0\r\nauthorization: Bearer s3cret\r\nx-request-id: mine\r\n\r\n")
        reply = await client.reply()
        assert reply.status == 401
        assert reply.headers["x-request-id"] != "mine"


@pytest.mark.parametrize(("num_bytes", "size"), [(3000, 1), (4 * MIB, 100)])
async def test_a_long_body_in_small_chunks_is_read(connect: Connect, num_bytes: int, size: int) -> None:
    async with strict_app() as app:
        client = await connect(app)
        client.send(CHUNKED + MULTIPART + b"\r\n")
        part = FILE_PART + bytes(num_bytes) + b"\r\n--limit--\r\n"
        chunks = (part[start : start + size] for start in range(0, len(part), size))
        client.send(b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n")
        assert (await client.reply()).error["code"] == "invalid_audio"


# -- Replies --


async def test_a_reader_that_stalls_is_disconnected(connect: Connect) -> None:
    async with strict_app() as app:
        client = await connect(app, receive_buffer=4096)
        client.ask("/big")
        await until(lambda: app.server.server_state.connections)
        await until(lambda: not num_connections(app))
        assert await app.still_works()


async def test_a_slow_reader_above_the_minimum_rate_gets_all_of_its_reply(connect: Connect) -> None:
    async with strict_app(client_grace_s=1.0) as app:
        client = await connect(app, receive_buffer=1 << 18)
        client.ask("/big")
        async with asyncio.timeout(60):
            await client.reader.readuntil(b"\r\n\r\n")
            for _ in range(8):  # twice the grace
                await client.reader.readexactly(1 << 19)
                await asyncio.sleep(0.25)
            await client.reader.readexactly(len(BIG) - 8 * (1 << 19))


# -- Connections --


async def test_a_connection_is_kept_for_the_next_request_but_not_for_ever(connect: Connect) -> None:
    async with strict_app(keep_alive_s=3) as app:
        client = await connect(app)
        for _ in range(2):
            client.ask("/health")
            assert (await client.reply()).status == 200
            await asyncio.sleep(2 * STRICT.client_grace_s)  # waiting for a next request is not reading one
        assert await client.is_closed()


async def test_a_new_connection_closes_the_one_that_has_been_idle_for_longest(connect: Connect) -> None:
    """It closed all idle ones, and with each perhaps a request that was just being sent."""
    async with strict_app(max_connections=3, keep_alive_s=100) as app:
        idle = [await connect(app) for _ in range(3)]
        for client in (*idle, idle[0]):
            client.ask("/health")
            assert (await client.reply()).status == 200
        assert await app.still_works()
        assert await idle[1].is_closed()
        for client in (idle[0], idle[2]):
            client.ask("/health")
            assert (await client.reply()).status == 200


async def test_a_connection_that_sends_nothing_makes_room(connect: Connect) -> None:
    async with strict_app(max_connections=3, client_grace_s=100.0) as app:
        silent = [await connect(app) for _ in range(3)]
        await until(lambda: len(waiting(app)) == 3)
        assert (await app.post()).status_code == 200
        assert await silent[0].is_closed()
        newest = await connect(app)
        newest.ask("/health")
        assert (await newest.reply()).status == 200


def waiting(app: RunningApp) -> Waiting:
    protocol = app.server.config.http
    assert isinstance(protocol, partial)
    found: Waiting = protocol.keywords["waiting"]
    return found


async def test_beyond_the_limit_of_connections_uploads_are_turned_away_and_probes_answered() -> None:
    async with strict_app(max_connections=2) as app, waiting_for_answers(app, 2):
        reply = await app.post()
        assert reply.status_code == 429
        assert "--max-connections" in reply.json()["error"]["message"]
        assert (await app.client.get("/health")).status_code == 200


async def test_too_many_connections_are_closed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "RESERVED_CONNECTIONS", 1)
    async with strict_app(max_connections=1, client_grace_s=100.0) as app, waiting_for_answers(app, 1):
        (await connect(app)).begin_upload()
        await until(lambda: num_connections(app) == 2)
        assert await (await connect(app)).is_closed()
        assert num_connections(app) == 2


@asynccontextmanager
async def waiting_for_answers(app: RunningApp, num_clients: int) -> AsyncIterator[None]:
    """Clients whose requests are being worked on for as long as the block takes."""
    app.replica.holding = True
    replies = [asyncio.create_task(app.post()) for _ in range(num_clients)]
    await until(lambda: len(app.replica.held) == num_clients)
    yield
    app.replica.stop_holding()
    assert [(await reply).status_code for reply in replies] == [200] * num_clients
