"""Ignore requests to upgrade to anything but WebSocket.

`curl --http2` and Java's HttpClient send `Upgrade: h2c` and accept HTTP/1.1; httptools drops their
bodies.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class _Receiver(Protocol):
    url: bytes
    headers: list[tuple[bytes, bytes]]

    def _should_upgrade(self) -> bool: ...


class ParserIgnoringUpgrades:
    """An `httptools.HttpRequestParser` that reads the head again without Upgrade."""

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
