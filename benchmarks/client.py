"""One request to a server, streamed: what was heard, and when.

Small and direct, because it shares the machine with the server: the usual client libraries take as much
processor time for a request as the server's own process does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from httptools import HttpResponseParser

READ_BYTES = 1 << 16
LIMIT_S = 600.0


class Answer(NamedTuple):
    text: str
    num_tokens: int
    first_text_s: float  # from the request's start
    total_s: float


class RefusedError(Exception):
    """Any status but 200."""


class Client:
    """Requests over connections that are kept, as many as are under way at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.idle: list[_Connection] = []

    @asynccontextmanager
    async def asking(self, method: str, path: str, *body: bytes, content_type: str) -> AsyncIterator[_Reply]:
        """The reply, once its headers are here. Raises RefusedError, OSError, TimeoutError."""
        connection = self._open_one() or await _Connection.open(self._host, self._port)
        try:
            async with asyncio.timeout(LIMIT_S):
                length = sum(map(len, body))
                head = (
                    f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
                    f"content-type: {content_type}\r\ncontent-length: {length}\r\n\r\n"
                )
                reply = await connection.ask(head.encode(), *body)
                if reply.status != 200:
                    raise RefusedError(f"{reply.status}: {b''.join([part async for part in reply]).decode()}")
                yield reply
        except BaseException:
            connection.close()
            raise
        if reply.is_complete:
            self.idle.append(connection)
        else:
            connection.close()

    def _open_one(self) -> _Connection | None:
        """One of those kept that the server has not closed meanwhile, as it closes what is idle for long."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.is_closed_by_server:
                return connection
            connection.close()
        return None

    async def get_json(self, path: str) -> Any:
        async with self.asking("GET", path, content_type="application/json") as reply:
            return json.loads(b"".join([part async for part in reply]))

    def close(self) -> None:
        for connection in self.idle:
            connection.close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int) -> _Connection:
        return cls(*await asyncio.open_connection(host, port))

    @property
    def is_closed_by_server(self) -> bool:
        return self._reader.at_eof()

    async def ask(self, *parts: bytes) -> _Reply:
        reply = _Reply(self._reader)
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()
        await reply.read_headers()
        return reply

    def close(self) -> None:
        self._writer.close()


class _Reply:
    """Iterate over it to have the parts of its body as they come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.is_complete = False
        self._reader = reader
        self._parser = HttpResponseParser(self)
        self._has_headers = False
        self._body: list[bytes] = []

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    async def read_headers(self) -> None:
        while not self._has_headers:
            await self._read()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            parts, self._body = self._body, []
            for part in parts:
                yield part
            if self.is_complete:
                return
            await self._read()

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise ConnectionError("the server has closed the connection")
        self._parser.feed_data(data)

    # -- What the parser calls --

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = Client(url)
    try:
        yield client
    finally:
        client.close()


async def transcribe(
    client: Client, name: str, data: bytes, fields: Mapping[str, str] | None = None
) -> Answer:
    """Raises RefusedError for any answer but 200, RuntimeError for an error within the stream."""
    boundary = secrets.token_hex(16)
    before, after = _form({"model": "whisper-1", "stream": "true", **(fields or {})}, name, boundary)
    content_type = f"multipart/form-data; boundary={boundary}"
    started, first_text_s, done = time.perf_counter(), 0.0, None
    async with client.asking(
        "POST", "/v1/audio/transcriptions", before, data, after, content_type=content_type
    ) as reply:
        async for event in _events(reply):
            elapsed_s = time.perf_counter() - started
            first_text_s = first_text_s or elapsed_s
            if event["type"] == "transcript.text.done":
                done = Answer(event["text"], event["usage"]["output_tokens"], first_text_s, elapsed_s)
            elif "delta" not in event:
                raise RuntimeError(f"{name}: {event}")
    if done is None:
        raise RuntimeError(f"{name}: the stream ended early")
    return done


def _form(fields: Mapping[str, str], name: str, boundary: str) -> tuple[bytes, bytes]:
    """What goes before the file's bytes, and what behind them."""
    disposition = f"--{boundary}\r\nContent-Disposition: form-data; name="
    parts = [f'{disposition}"{field}"\r\n\r\n{value}\r\n' for field, value in fields.items()]
    file = f'{disposition}"file"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
    return "".join([*parts, file]).encode(), f"\r\n--{boundary}--\r\n".encode()


async def _events(reply: _Reply) -> AsyncIterator[dict[str, Any]]:
    unread = b""
    async for part in reply:
        *events, unread = (unread + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event.removeprefix(b"data: "))
