"""Connections that begin with a TLS handshake, which count and are timed from their first byte."""

import asyncio
import logging
import socket
import ssl

import httpx
import pytest

from asr_server.protocols import http as protocol_module
from tests import conftest
from tests.conftest import WITHOUT_ENGINE
from tests.support.embedded import embedded
from tests.support.raw_client import RawClient
from tests.support.until import until
from tests.unit.api.running_app import run_app

TICK_S = 0.02


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "TICK_S", TICK_S)


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(certificate: str) -> None:
    async with run_app(embedded(ssl_certfile=certificate)) as app:
        client = await RawClient.connect(app.host, app.port)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl._create_unverified_context()
        tls = context.wrap_bio(incoming, outgoing)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.send(outgoing.read())
                incoming.write(await client.reader.read(1 << 16))
        tls.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        client.send(outgoing.read())  # the last of the handshake too
        reply = b""
        while not reply.startswith(b"HTTP/1.1 200"):
            try:
                reply += tls.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(await client.reader.read(1 << 16))
        await client.close()


async def test_silent_connections_count_and_make_room_before_their_handshake(certificate: str) -> None:
    settings = embedded(ssl_certfile=certificate, max_connections=3, client_grace_s=100.0)
    async with run_app(settings) as app:
        silent = [await RawClient.connect(app.host, app.port) for _ in range(3)]
        await until(lambda: len(app.server.server_state.connections) == 3)
        await asyncio.sleep(3 * TICK_S)  # the ticks of these, by the same event loop
        assert await app.still_works()
        assert await silent[0].is_closed()
        for client in silent:
            await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
async def test_a_handshake_has_the_time_of_headers(certificate: str, first: bytes) -> None:
    async with run_app(embedded(ssl_certfile=certificate, client_grace_s=0.3)) as app:
        client = await RawClient.connect(app.host, app.port)
        client.send(first)
        assert await client.is_closed()
        await client.close()
        await until(lambda: not app.server.server_state.connections)


async def test_non_tls_leaves_no_traceback(certificate: str, caplog: pytest.LogCaptureFixture) -> None:
    async with run_app(embedded(ssl_certfile=certificate)) as app:
        client = await RawClient.connect(app.host, app.port)
        client.ask("/health")
        assert await client.is_closed()
        await client.close()
        await (await RawClient.connect(app.host, app.port)).close()
        assert await app.still_works()
        await until(lambda: len(app.server.server_state.connections) <= 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_a_server_with_a_certificate_shows_silent_connections_out(certificate: str) -> None:
    options = ("--ssl-certfile", certificate, "--client-grace-s", "1", "--max-connections", "4")
    with conftest.run_server(*WITHOUT_ENGINE, *options) as server:
        url = httpx.URL(server.url)
        assert url.scheme == "https"
        silent = [socket.create_connection((url.host, url.port or 0)) for _ in range(20)]
        assert server.get("/health").status_code == 200
        for connection in silent:
            with connection:
                connection.settimeout(20)
                assert connection.recv(1) == b""
        assert "Traceback" not in server.written()
