"""Logs and counts each request with its outcome."""

from __future__ import annotations

import logging
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_server import metrics

QUIET_ROUTES: Final = frozenset({"/health", "/ping", "/ready", "/load", "/version", "/metrics"})
UNKNOWN_ROUTE: Final = "other"
NO_REPLY: Final = 499  # nginx's number for a client that left

logger = logging.getLogger(__name__)


class RequestLogMiddleware:
    """The outermost one, so that it sees every reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        status = NO_REPLY

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            _report(scope, status, time.monotonic() - started_at)


def _report(scope: Scope, status: int, duration_s: float) -> None:
    route = _route_of(scope)
    metrics.requests.labels(route, str(status)).inc()
    metrics.request_seconds.labels(route).observe(duration_s)
    level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
    path = route if route != UNKNOWN_ROUTE else scope.get("raw_path", b"").decode("ascii", "replace")[:200]
    logger.log(level, "%s %s: %d in %.3f s", scope["method"], path, status, duration_s)


def _route_of(scope: Scope) -> str:
    """The pattern of the path, as often as there are routes: paths themselves are up to the client."""
    return getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
