"""Keep other sites' pages away from a server without a key.

Browsers send the looked-up name as Host and the page's site as Origin. The Host stops DNS rebinding, the
Origin stops WebSockets, which CORS does not cover.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from asr_server.api.errors import response_to
from asr_server.config import Settings, naming
from asr_server.errors import HostNotAllowed, OriginNotAllowed
from asr_server.machine import is_loopback

_PORT: Final = re.compile(r":\d*$")
_MAX_QUOTED: Final = 200  # characters


class LocalHosts:
    """Refuse requests to a loopback address for another host."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._allowed = settings.allowed_host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] in ("http", "websocket") else ""
        if self._allows(_PORT.sub("", host.lower())):
            await self._app(scope, receive, send)
            return
        error = HostNotAllowed(
            f"This server has no key and is for this machine alone; it does not answer as "
            f"'{host[:_MAX_QUOTED]}'. Allow the name by {naming('allowed_hosts')}, or set a key."
        )
        await response_to(error)(scope, receive, send)

    def _allows(self, name: str) -> bool:
        """Allow a missing Host, as in HTTP/1.0; browsers always send one."""
        return not name or is_loopback(name) or name in self._allowed


def checks_hosts(settings: Settings) -> bool:
    return is_loopback(settings.host) and not settings.asks_for_key and "*" not in settings.allowed_host_names


def check_origin(connection: HTTPConnection, settings: Settings) -> None:
    """Raise OriginNotAllowed for another site's page. Other clients send no Origin."""
    origin = connection.headers.get("origin")
    if origin is None or settings.asks_for_key:
        return
    is_own = origin.lower().partition("://")[2] == connection.headers.get("host", "").lower()
    if not is_own and not {origin, "*"} & {*settings.allowed_origins}:
        raise OriginNotAllowed(
            f"Pages of '{origin[:_MAX_QUOTED]}' may open no session on a server without a key. Allow the "
            f"origin by {naming('cors_origins')}, or set a key."
        )
