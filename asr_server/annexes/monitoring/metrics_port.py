"""Serve probes and metrics on a port of their own (`--metrics-port`), without a key and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from asr_server.annexes.monitoring import MonitoringSettings
from asr_server.config import Settings
from asr_server.machine import in_url, sockets_for
from asr_server.protocols.tls import http_protocol

CLOSE_LIMIT_S: Final = 1  # for the last replies to be read


def settings_of_port(settings: MonitoringSettings) -> MonitoringSettings:
    """Return the settings that hold on the port."""
    host = settings.metrics_host or settings.host
    return replace(
        settings,
        host=host,
        port=settings.metrics_port,
        ssl_certfile="",
        ssl_keyfile="",
        cors_origins="",
        root_path="",
    )


@asynccontextmanager
async def listening(app: ASGIApp, settings: Settings) -> AsyncIterator[str]:
    """Serve while the block runs; yield the URL."""
    server = uvicorn.Server(_config(app, settings))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    sockets = sockets_for(settings.host, settings.port)
    await server.startup(sockets)
    running = asyncio.create_task(server.main_loop(), name="metrics port")
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{in_url(host)}:{port}"
    finally:
        server.should_exit = True
        await running
        await server.shutdown(sockets)


def _config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http_protocol(settings),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        host=settings.host,
        port=settings.port,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=CLOSE_LIMIT_S,
        log_config=None,
        access_log=False,
        server_header=False,
    )
