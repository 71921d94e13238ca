"""Clients of HTTP/1.0, and clients that offer another protocol, as `curl --http2` and Java's do."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from tests.support.raw_client import RawClient
from tests.unit.api.running_app import SECOND, RunningApp


@pytest.fixture
def pieces(app: RunningApp) -> RunningApp:
    """An app that has a reply of unknown length, and one of known length."""

    async def three() -> AsyncIterator[bytes]:
        for piece in (b"one,", b"", b"two,", b"three"):
            yield piece

    @app.app.api_route("/pieces", methods=["GET", "HEAD"])
    async def streamed() -> Response:
        return StreamingResponse(three())

    @app.app.api_route("/whole", methods=["GET", "HEAD"])
    async def whole() -> Response:
        return PlainTextResponse("one,two")

    return app


async def asked(app: RunningApp, method: str, path: str, version: str) -> tuple[bytes, bytes]:
    """Return the head and all that comes behind it until the server closes."""
    client = await RawClient.connect(app.host, app.port)
    close = "connection: close\r\n" * (version == "1.1")
    client.send(f"{method} {path} HTTP/{version}\r\nhost: localhost\r\n{close}\r\n".encode())
    async with asyncio.timeout(60):
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    await client.close()
    return head.lower(), body


@pytest.mark.parametrize(
    ("method", "path", "version", "body", "is_chunked"),
    [
        ("GET", "/pieces", "1.0", b"one,two,three", False),
        ("HEAD", "/pieces", "1.0", b"", False),
        ("GET", "/whole", "1.0", b"one,two", False),
        ("HEAD", "/whole", "1.0", b"", False),
        ("GET", "/pieces", "1.1", b"4\r\none,\r\n4\r\ntwo,\r\n5\r\nthree\r\n0\r\n\r\n", True),
    ],
)
async def test_a_reply_of_unknown_length_has_no_chunks(
    pieces: RunningApp, method: str, path: str, version: str, body: bytes, is_chunked: bool
) -> None:
    head, came = await asked(pieces, method, path, version)
    assert head.startswith(b"http/1.1 200")
    assert came == body
    assert (b"transfer-encoding: chunked" in head) == is_chunked
    assert (b"content-length: 7" in head) == (path == "/whole")


UPGRADE = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}


async def test_an_upload_that_offers_http2_is_transcribed(app: RunningApp) -> None:
    for _ in range(2):  # the connection is kept
        reply = await app.client.post(
            "/v1/audio/transcriptions", files={"file": SECOND}, data={"model": "whisper-1"}, headers=UPGRADE
        )
        assert reply.json()["text"] == "zero"


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_a_chunked_body_behind_an_offer_is_read_however_it_comes(app: RunningApp, size: int) -> None:
    head = "POST /v1/realtime/client_secrets HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in UPGRADE.items())
    data = f"{head}\r\n2\r\n{{}}\r\n0\r\n\r\nGET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    client = await RawClient.connect(app.host, app.port)
    for at in range(0, len(data), size):
        client.send(data[at : at + size])
        await client.writer.drain()
    assert (await client.reply()).status == 200
    assert (await client.reply()).status == 200
    await client.close()
