"""Logs and counts each request, and each WebSocket, with its outcome."""

from __future__ import annotations

import logging
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_server import metrics
from asr_server.api.errors import CLIENT_CLOSED_REQUEST
from asr_server.telemetry import FIGURES

QUIET_ROUTES: Final = frozenset({"/health", "/ping", "/ready", "/load", "/version", "/metrics"})
UNKNOWN_ROUTE: Final = "other"
NO_CLOSE_CODE: Final = 1005  # the protocol's number for a close without one
BROKEN: Final = 1006  # and for a connection that ended without a close
MAX_STANDARD_CODE: Final = 1015  # clients may choose larger ones

logger = logging.getLogger(__name__)


class RequestLogMiddleware:
    """The outermost one, so that it sees every reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve_request(scope, receive, send)
            case "websocket":
                await self._serve_session(scope, receive, send)
            case _:
                await self._app(scope, receive, send)

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = time.monotonic()
        stats = metrics.begin_request_stats(lambda: _route_of(scope))
        status = CLIENT_CLOSED_REQUEST

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            route = _route_of(scope)
            path = _path_of(scope, route)
            duration_s = time.monotonic() - started_at
            report_request(f"{scope['method']} {path}", route, status, duration_s, stats)

    async def _serve_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of a WebSocket. Whoever closes it first gives the code."""
        started_at = time.monotonic()
        stats = metrics.begin_request_stats(lambda: _route_of(scope))
        closed_by, code = "nobody", BROKEN

        def note(who: str, message: Message, type: str) -> None:
            nonlocal closed_by, code
            if message["type"] == type and closed_by == "nobody":
                closed_by, code = who, message.get("code") or NO_CLOSE_CODE

        async def receive_and_note_code() -> Message:
            message = await receive()
            note("the client", message, "websocket.disconnect")
            return message

        async def send_and_note_code(message: Message) -> None:
            note("the server", message, "websocket.close")
            await send(message)

        try:
            await self._app(scope, receive_and_note_code, send_and_note_code)
        finally:
            route, duration_s = _route_of(scope), time.monotonic() - started_at
            if route != UNKNOWN_ROUTE:
                metrics.realtime_closed.labels(str(code) if code <= MAX_STANDARD_CODE else "other").inc()
            path = _path_of(scope, route)
            what = "WebSocket %s: closed by %s with %d after %.3f s%s"
            extra = {FIGURES: stats.summary()}
            logger.info(what, path, closed_by, code, duration_s, stats, extra=extra)


def report_request(
    what: str, route: str, status: int, duration_s: float, stats: metrics.RequestStats
) -> None:
    """Logs one request and counts it; another protocol gives the status that HTTP would."""
    metrics.requests.labels(route, str(status)).inc()
    metrics.request_seconds.labels(route).observe(duration_s)
    level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
    extra = {FIGURES: stats.summary()}
    logger.log(level, "%s: %d in %.3f s%s", what, status, duration_s, stats, extra=extra)


def _path_of(scope: Scope, route: str) -> str:
    if route != UNKNOWN_ROUTE:
        return route
    return str(scope.get("raw_path", b"").decode("ascii", "replace")[:200])


def _route_of(scope: Scope) -> str:
    """The pattern of the path, as often as there are routes: paths themselves are up to the client."""
    return getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
