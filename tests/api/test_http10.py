"""Clients of HTTP/1.0 know no chunks: the end of the connection is the end of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from tests.api.raw_client import RawClient
from tests.api.running_app import RunningApp


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
