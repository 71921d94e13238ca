"""What wraps every route: ids, log, metrics, uncaught exceptions, hosts, short ways."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from asr_server import metrics
from asr_server.api.errors import CLIENT_CLOSED_REQUEST, HANDLED, response_to
from asr_server.api.schemas import REQUEST_ID, SAFE_HEADERS
from asr_server.config import Settings, naming
from asr_server.errors import HostNotAllowed, OriginNotAllowed, ShuttingDown
from asr_server.machine import is_loopback
from asr_server.telemetry import FIGURES, current_request_id

# In the state of a request or session, beside its id:
REFUSED: Final = "refused"  # the status of the reply that `protocols.http` has sent in the request's place
OVER_LIMIT: Final = "over_connection_limit"  # true on a connection beyond `max_connections`
CLOSED_BY_SERVER: Final = "closed_by_server"  # for a frame that may not come

QUIET_ROUTES: Final = frozenset(
    {"/health", "/ping", "/ready", "/load", "/version", "/metrics", "/v1/activity"}
)
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # probes, the page, preflights
UNKNOWN_ROUTE: Final = "other"
NOT_READY: Final = "not_ready"  # in the place of a status that would count as a fault of the server
NO_CLOSE_CODE: Final = 1005  # the protocol's number for a close without one
BROKEN: Final = 1006  # and for a connection that ended without a close
MAX_STANDARD_CODE: Final = 1015  # clients may choose larger ones
SWITCHED: Final = 101  # HTTP's status of a handshake that opened a session
LAST_MESSAGES_S: Final = 1.0
MAX_ANSWERS: Final = 4096  # requests
_FIRST_OF_A_REPLY: Final = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)
_SANE: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

logger = logging.getLogger(__name__)


class Tracer(Protocol):
    def on_begun(self, scope: Scope, stats: metrics.RequestStats) -> None: ...

    def on_ended(self, what: str, stats: metrics.RequestStats, figures: Mapping[str, Any]) -> None:
        """Take the figures of the log line; a session's have `close_code` in the place of `status`."""


class Ended(NamedTuple):
    at: float  # of time.monotonic()
    request_id: str
    figures: Mapping[str, Any]  # of the log line


class History:
    """The last requests, but probes, the page and sessions."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.began_at = time.monotonic()
        self.recent = deque[Ended](maxlen=MAX_ANSWERS)
        self.tracer = tracer

    def add(self, what: str, stats: metrics.RequestStats, figures: Mapping[str, Any]) -> None:
        if figures.get("method") not in SAFE_METHODS and "status" in figures:
            self.recent.append(Ended(time.monotonic(), current_request_id.get(), figures))
        if self.tracer:
            self.tracer.on_ended(what, stats, figures)


def request_id_of(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    return given if _SANE.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class LastErrorMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:  # the server's end; it closes the connection behind half a reply
            if not has_started:
                await response_to(ShuttingDown())(scope, receive, send)
        except Exception as error:
            logger.exception("%s failed", scope["method"])
            if has_started:
                raise  # the connection is closed: half a reply must not look like a whole one
            await response_to(error)(scope, receive, send)


class RequestLogMiddleware:
    """Give each request an id, log and remember it. Outermost, to see every reply."""

    def __init__(self, app: ASGIApp, history: History) -> None:
        self._app, self._history = app, history

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        current_request_id.set(request_id)
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        stats = metrics.begin_request_stats(lambda: _route_of(scope))
        stats.asked_for["client"] = _client_of(scope)
        if self._history.tracer:
            self._history.tracer.on_begun(scope, stats)
        if scope["path"].removeprefix(scope.get("root_path", "")).strip("/"):
            scope["path"] = scope["path"].rstrip("/")  # a slash at the end changes nothing

        started_at, course = time.monotonic(), _Course()

        async def send_with_id(message: Message) -> None:
            if message["type"] in _FIRST_OF_A_REPLY:
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if stats.account and stats.is_metered:
                    headers.update(stats.account.headers())
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            course.on_sent(message)
            await send(message)

        async def receive_and_note() -> Message:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                who = "the server" if CLOSED_BY_SERVER in scope["state"] else "the client"
                course.on_closed(message, who)
            return message

        try:
            await self._app(scope, receive_and_note, send_with_id)
            if scope["type"] == "websocket" and not course.closed_by and not course.status:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_MESSAGES_S):
                        while (await receive_and_note())["type"] != "websocket.disconnect":
                            pass
        finally:
            self._end(scope, course, time.monotonic() - started_at, stats)

    def _end(self, scope: Scope, course: _Course, duration_s: float, stats: metrics.RequestStats) -> None:
        route = path = _route_of(scope)
        if route == UNKNOWN_ROUTE:
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:200]
        if scope["type"] == "websocket":
            what, status = f"WebSocket {path}", course.status
        else:
            what = f"{scope['method']} {path}"
            status = scope["state"].get(REFUSED) or course.status or CLIENT_CLOSED_REQUEST
            stats.asked_for["method"] = scope["method"]
        if status:
            figures = report_request(what, route, status, duration_s, stats)
        else:
            end = f"{what}: closed by {course.closed_by or 'nobody'}"
            figures = report_session(end, route, course.code, duration_s, stats)
        if stats.is_metered and stats.account:
            stats.account.answers[figures.get("status", SWITCHED)] += 1
        self._history.add(what, stats, figures)


class _Course:
    """The course and the end of a request or session."""

    def __init__(self) -> None:
        self.status = 0  # of the reply; 0: there was none, or a session was opened
        self.closed_by, self.code = "", BROKEN

    def on_sent(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
        elif message["type"] == "websocket.close":
            self.on_closed(message, "the server")

    def on_closed(self, message: Message, who: str) -> None:
        if not self.closed_by:
            self.code = message.get("code") or NO_CLOSE_CODE
            self.closed_by = "nobody" if self.code == BROKEN else who


def report_session(
    what: str, route: str, code: int, duration_s: float, stats: metrics.RequestStats
) -> dict[str, Any]:
    if route != UNKNOWN_ROUTE:
        metrics.realtime_closed.labels(str(code) if code <= MAX_STANDARD_CODE else "other").inc()
    figures = {"route": route, "close_code": code, "seconds": round(duration_s, 3)} | stats.summary()
    logger.info("%s with %d after %.3f s%s", what, code, duration_s, stats, extra={FIGURES: figures})
    return figures


def report_request(
    what: str, route: str, status: int, duration_s: float, stats: metrics.RequestStats
) -> dict[str, Any]:
    metrics.requests.labels(route, NOT_READY if (route, status) == ("/ready", 503) else str(status)).inc()
    metrics.request_seconds.labels(route).observe(duration_s)
    if stats.error_code:
        metrics.request_errors.labels(route, stats.error_code).inc()
    if status < HTTPStatus.BAD_REQUEST:
        stats.on_answered(route)
    level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
    figures = {"route": route, "status": status, "seconds": round(duration_s, 3)} | stats.summary()
    logger.log(level, "%s: %d in %.3f s%s", what, status, duration_s, stats, extra={FIGURES: figures})
    return figures


def _client_of(scope: Scope) -> str:
    address: str = (scope.get("client") or ("",))[0]
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address.partition("%")[0]))
    return ""


def _route_of(scope: Scope) -> str:
    """Return the route's pattern: a path could have any value."""
    return getattr(scope.get("route"), "path", UNKNOWN_ROUTE)


class PlainRoutes:
    """Call the endpoints of recordings without FastAPI's routing, a tenth of a short request's time.

    These endpoints take the request alone: a parameter that FastAPI would fill is not.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes if isinstance(route, APIRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route_of(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            for depends in route.dependencies:
                await depends.dependency(request)  # type: ignore[misc]  # it is never None here
            response = await route.endpoint(request)
            await response(scope, receive, send)
        except HANDLED as error:
            await response_to(error)(scope, receive, send)

    def _route_of(self, scope: Scope) -> APIRoute | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        return self._routes.get(scope["path"].removeprefix(scope.get("root_path", "")))


def refusing_unknown_websockets(not_found: ASGIApp) -> ASGIApp:
    """Answer 404 to a WebSocket at an unknown path, where Starlette's own refusal becomes 403."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await not_found(scope, receive, send)
            return
        error = HTTPException(HTTPStatus.NOT_FOUND, "There is no WebSocket at this path.")
        await WebSocket(scope, receive, send).send_denial_response(response_to(error))

    return refuse


# -- Other sites ---------------------------------------------------------------------------------------------
#
# Their pages are kept away from a server without a key. Browsers send the looked-up name as Host and the
# page's site as Origin. The Host stops DNS rebinding, the Origin stops WebSockets, which CORS does not cover.

_PORT: Final = re.compile(r":\d*$")
_MAX_QUOTED: Final = 200  # characters
_USUAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class LocalHosts:
    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._allowed = _USUAL_HOSTS.union(settings.allowed_host_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] in ("http", "websocket") else ""
        name = _PORT.sub("", host.lower())
        # HTTP/1.0 may leave the Host out; browsers always send one.
        if not name or name in self._allowed or is_loopback(name):
            await self._app(scope, receive, send)
            return
        error = HostNotAllowed(
            f"This server has no key and is for this machine alone; it does not answer as "
            f"'{host[:_MAX_QUOTED]}'. Allow the name by {naming('allowed_hosts')}, or set a key."
        )
        await response_to(error)(scope, receive, send)


def checks_hosts(settings: Settings, asks_for_key: bool) -> bool:
    return is_loopback(settings.host) and not asks_for_key and "*" not in settings.allowed_host_names


def check_origin(connection: HTTPConnection, settings: Settings, asks_for_key: bool) -> None:
    """Raise OriginNotAllowed for another site's page. Other clients send no Origin."""
    origin = connection.headers.get("origin")
    if origin is None or asks_for_key:
        return
    is_own = origin.lower().partition("://")[2] == connection.headers.get("host", "").lower()
    if not is_own and not {origin, "*"} & {*settings.allowed_origins}:
        raise OriginNotAllowed(
            f"Pages of '{origin[:_MAX_QUOTED]}' may open no session on a server without a key. Allow the "
            f"origin by {naming('cors_origins')}, or set a key."
        )
