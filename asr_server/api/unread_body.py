"""Bounds what is read after a reply that was sent before the body had come whole: a 401, 413 or 429."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_server.config import MIB

MAX_DISCARDED_BYTES: Final = 1024 * MIB  # at a second or so of work
MAX_DISCARD_S: Final = 30.0


class UnreadBodyMiddleware:
    """Sends the reply, discards what still comes of the body, up to a bound, and closes the connection.

    To close at once would reset the connection, and a client that first sends its whole body might never see
    the reply. To read on without a bound would let it send for ever.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def send_and_discard(message: Message) -> None:
            if body.is_read:
                await send(message)
            elif message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
            elif message.get("more_body", False):
                await send(message)
            else:
                await send({**message, "more_body": True})  # the client has all of the reply now
                await body.discard()
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, body.receive, send_and_discard)


class _Body:
    def __init__(self, receive: Receive) -> None:
        self.is_read = False
        self._receive = receive

    async def receive(self) -> Message:
        message = await self._receive()
        self.is_read = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_DISCARD_S):
                while not self.is_read and num_bytes < MAX_DISCARDED_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
