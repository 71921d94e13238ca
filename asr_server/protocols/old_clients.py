"""Serve HTTP/1.0 clients."""

from __future__ import annotations

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
