"""Call the endpoints of recordings without FastAPI's routing, a tenth of a short request's time.

The innermost middleware, so replies, ids, log and metrics stay the same. FastAPI documents these routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from asr_server.api.errors import HANDLED, reply_to, response_to


class PlainRoutes:
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
            await reply_to(error)(scope, receive, send)

    def _route_of(self, scope: Scope) -> APIRoute | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        return self._routes.get(scope["path"].removeprefix(scope.get("root_path", "")))


class TrailingSlashes:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path, root = scope["path"], scope.get("root_path", "")
            if path.endswith("/") and path.removeprefix(root).strip("/"):
                scope["path"] = path.rstrip("/")
        await self._app(scope, receive, send)


def refusing_unknown_websockets(not_found: ASGIApp) -> ASGIApp:
    """Answer 404 to a WebSocket at an unknown path, where Starlette's own refusal becomes 403."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await not_found(scope, receive, send)
            return
        error = HTTPException(HTTPStatus.NOT_FOUND, "There is no WebSocket at this path.")
        await WebSocket(scope, receive, send).send_denial_response(response_to(error))

    return refuse
