"""Runs the API process from start to stop. Called by `cli.serve`."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import uvicorn

from asr_server.api.app import create_app
from asr_server.api.realtime.client_events import MAX_MESSAGE_BYTES
from asr_server.api.realtime.registry import RealtimeSessions
from asr_server.audio import PreprocessPool
from asr_server.config import Settings
from asr_server.telemetry import announce
from asr_server.tokenizer import Tokenizer
from asr_server.workers.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Serves until told to stop (SIGINT, SIGTERM). Requests that run then have `drain_s` to finish."""
    tokenizer = Tokenizer.from_directory(Path(settings.model))
    pool = PreprocessPool(settings.preprocess_workers)
    pool.warm_up()  # its libraries load while the engine's do
    app = create_app(settings, Dispatcher(settings), pool, tokenizer)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        root_path=settings.root_path,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=False,  # `request_log` writes one that has the request ids
        server_header=False,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # base64 of audio shrinks little, and bombs shrink a lot
    )
    _Server(config, app.state.server.realtime).run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, realtime: RealtimeSessions) -> None:
        super().__init__(config)
        self._realtime = realtime

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens once it does: with port 0 nobody knows before."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            announce(f"listening on {scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Realtime sessions first: uvicorn closes every WebSocket at once, whatever is still being read."""
        for server in self.servers:
            server.close()
        limit_s = self.config.timeout_graceful_shutdown or 1
        started_at = time.monotonic()
        await self._realtime.drain(limit_s)
        spent_s = round(time.monotonic() - started_at)
        self.config.timeout_graceful_shutdown = max(1, limit_s - spent_s)
        await super().shutdown(sockets)
