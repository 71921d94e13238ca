"""Give Starlette's plain refusals the usual error body: ranges, preflights, unknown WebSockets."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_server.api.errors import response_to
from asr_server.api.hints import unknown_path

_OF_THE_BODY: Final = frozenset(("content-type", "content-length"))


class PlainErrors:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, _JsonErrors(scope, receive, send).send)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, _Denials(scope, receive, send).send)
        else:
            await self._app(scope, receive, send)


class _JsonErrors:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None  # of a plain error, whose text is still to come
        self._text = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_plain_error(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)

    async def _send_error(self, start: Message) -> None:
        sent = Headers(raw=start["headers"])
        headers = {name: value for name, value in sent.items() if name not in _OF_THE_BODY}
        phrase = HTTPStatus(start["status"]).phrase
        error = HTTPException(start["status"], self._text.decode() or phrase, headers)
        await response_to(error)(self._scope, self._receive, self._send)


def _is_plain_error(start: Message) -> bool:
    is_plain = Headers(raw=start["headers"]).get("content-type", "").startswith("text/plain")
    return is_plain and start["status"] >= HTTPStatus.BAD_REQUEST


class _Denials:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._is_answered = False

    async def send(self, message: Message) -> None:
        """Treat a close before any other message as a refused handshake."""
        if message["type"] == "websocket.close" and not self._is_answered:
            error = HTTPException(HTTPStatus.NOT_FOUND, unknown_path(self._scope["path"]))
            await response_to(error)(self._scope, self._receive, self._send)
        else:
            await self._send(message)
        self._is_answered = True
