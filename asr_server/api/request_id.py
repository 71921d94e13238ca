"""Gives every request an id, and its reply and all that is logged for it that id.

What nobody else has caught becomes a 500 here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_server.api.errors import response_to
from asr_server.errors import ShuttingDown
from asr_server.telemetry import current_request_id

REQUEST_ID: Final = "x-request-id"
_SANE: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

logger = logging.getLogger(__name__)


def request_id_of(headers: Headers) -> str:
    """The client's own where it is sane, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _SANE.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        current_request_id.set(request_id)
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server's end; it closes the connection behind half a reply
            if not has_started:
                await response_to(ShuttingDown())(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("%s failed", scope["method"])
            if has_started:
                raise  # the connection is closed: half a reply must not look like a whole one
            await response_to(error)(scope, receive, send_with_id)
