"""Serve probes and metrics on a port of their own (`--metrics-port`), without a key and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from asr_server.annexes.monitoring import MonitoringSettings
from asr_server.config import Settings
from asr_server.machine import in_url, sockets_for
from asr_server.protocols.tls import server_config
from asr_server.telemetry import announce


@asynccontextmanager
async def metrics_port(
    settings: MonitoringSettings, create_app: Callable[[Settings], ASGIApp]
) -> AsyncIterator[None]:
    """Serve while the block runs, if there is such a port."""
    if not settings.has_metrics_port:
        yield
        return
    host, port = settings.metrics_host or settings.host, settings.metrics_port
    own = replace(
        settings, host=host, port=port, ssl_certfile="", ssl_keyfile="", cors_origins="", root_path=""
    )
    server = uvicorn.Server(server_config(create_app(own), own, ws="none", lifespan="off"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    sockets = sockets_for(host, port)
    await server.startup(sockets)
    running = asyncio.create_task(server.main_loop(), name="metrics port")
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    announce(f"metrics on http://{in_url(host)}:{port}/metrics")
    try:
        yield
    finally:
        server.should_exit = True
        await running
        await server.shutdown(sockets)
