"""Serve HTTP/1.0 clients, and those that offer to upgrade to anything but WebSocket."""

from __future__ import annotations

from typing import Protocol

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UntilClose:
    """Send replies of unknown length without chunks, ended by the connection, as HTTP/1.0 requires."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle
        self._has_length = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_chunks(message: Message) -> None:
            self._prepare(message)
            await send(message)

        await self._app(scope, receive, send_without_chunks)

    def _prepare(self, message: Message) -> None:
        """Let uvicorn take each piece as all that was announced."""
        if message["type"] == "http.response.start":
            self._has_length = "content-length" in Headers(raw=message["headers"])
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length and self._cycle.scope["method"] != "HEAD":
            self._cycle.expected_content_length = len(message.get("body", b""))


class _Receiver(Protocol):
    url: bytes
    headers: list[tuple[bytes, bytes]]

    def _should_upgrade(self) -> bool: ...


class ParserIgnoringUpgrades:
    """An `httptools.HttpRequestParser` that reads the head again without Upgrade.

    `curl --http2` and Java's HttpClient send `Upgrade: h2c` and accept HTTP/1.1; httptools drops their
    bodies.
    """

    def __init__(self, receiver: _Receiver) -> None:
        self._receiver = receiver
        self._parser = httptools.HttpRequestParser(receiver)

    @property
    def ignores_upgrade(self) -> bool:
        is_upgrade = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        return is_upgrade and not self._receiver._should_upgrade()

    def feed_data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.ignores_upgrade:
                raise
            rest = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self._parser = httptools.HttpRequestParser(self._receiver)
            self._parser.feed_data(head)
            self.feed_data(rest)

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._receiver.url, self.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self._receiver.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()
