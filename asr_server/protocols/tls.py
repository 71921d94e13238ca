"""Bound a connection from its first byte: event loops announce one only after its TLS handshake."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from asr_server.config import Settings
from asr_server.protocols.http import BoundedHttpProtocol, Waiting

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S: Final = 1  # for the last replies to be read
SPARE_S: Final = 5.0  # the ticks of the HTTP protocol end a handshake before the event loop does


def http_protocol(settings: Settings) -> Callable[..., asyncio.Protocol]:
    bounded = partial(BoundedHttpProtocol, settings=settings, waiting=Waiting())
    if not settings.ssl_certfile:
        return bounded
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None)
    limit_s = settings.client_grace_s + SPARE_S
    return lambda **options: TlsHandshake(bounded(**options), context, limit_s)


def server_config(app: ASGIApp, settings: Settings, **own: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http_protocol(settings),  # type: ignore[arg-type]  # uvicorn only calls it
        host=settings.host,
        port=settings.port,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=CLOSE_LIMIT_S,
        log_config=None,
        access_log=False,  # `middleware.py` writes one that has the request ids
        server_header=False,
        **own,
    )


class TlsHandshake(asyncio.Protocol):
    def __init__(self, http: BoundedHttpProtocol, context: ssl.SSLContext, limit_s: float) -> None:
        self._http = http
        self._context = context
        self._limit_s = limit_s
        self._has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        connection.setblocking(False)
        transport.abort()  # uvloop's start_tls loses what comes before it, and uvloop begins to read at once
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection))
        task.add_done_callback(self._on_done)
        self._http.connection_made(_TransportInHandshake(connection, task))

    async def _shake_hands(self, connection: socket.socket) -> None:
        self._has_begun = True  # from here on the event loop closes the connection
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._http, connection, ssl=self._context, ssl_handshake_timeout=self._limit_s
            )
        except OSError as error:  # no TLS, or the client has left
            logger.debug("no TLS handshake with %s: %s", self._http.client, error)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        transport = self._http.transport
        if isinstance(transport, _TransportInHandshake):
            if not self._has_begun:
                transport.get_extra_info("socket").close()
            self._http.connection_lost(None)


class _TransportInHandshake(asyncio.Transport):
    def __init__(self, connection: socket.socket, handshake: asyncio.Task[None]) -> None:
        super().__init__({"socket": connection})
        self._task = handshake

    def is_closing(self) -> bool:
        return self._task.done() or self._task.cancelling() > 0

    def close(self) -> None:
        self._task.cancel()

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0
