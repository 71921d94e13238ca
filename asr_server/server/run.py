"""Run the API process: event loop, signals and drain. Knows no routes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn

from asr_server import machine
from asr_server.annexes.model_sources.names import repositories
from asr_server.annexes.ray import RaySettings
from asr_server.annexes.realtime.client_events import MAX_MESSAGE_BYTES
from asr_server.annexes.wyoming import WyomingSettings
from asr_server.api.models import Models, ServedModel
from asr_server.api.state import AppState
from asr_server.audio.recording import PreprocessPool
from asr_server.checkpoint.files import name_elsewhere
from asr_server.config import NO_PORT, Settings, in_mebibytes, naming
from asr_server.dispatch.executors import create_local_executor
from asr_server.dispatch.supervisor import Executor
from asr_server.errors import ShuttingDown
from asr_server.protocols.tls import CLOSE_LIMIT_S, server_config
from asr_server.protocols.websockets import BoundedWebSocketProtocol
from asr_server.server.app import create_app
from asr_server.server.settings import ServerSettings
from asr_server.telemetry import announce

if TYPE_CHECKING:
    from asr_server.annexes.monitoring.traces import Traces
    from asr_server.annexes.wyoming.server import WyomingServer


# Exit statuses
STOPPED: Final = 0
ENGINE_FAILED: Final = 1
PORT_TAKEN: Final = 3  # uvicorn's own for --port

_COLLECTOR: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_POLL_S: Final = 0.05
FILES_PER_CONNECTION: Final = 2  # its socket, and the upload that it sends
FILES_BESIDE: Final = 256  # libraries, replicas, decode processes, connections kept for probes

logger = logging.getLogger(__name__)


def run(models_settings: Sequence[ServerSettings]) -> int:
    """Serve until SIGINT or SIGTERM; requests in flight get `drain_s`. Return the exit status."""
    settings = models_settings[0]  # what is not of a model is the same in all
    _warn_of_few_files(machine.raise_open_files_limit(), settings)
    pool = PreprocessPool(settings.preprocess_workers)
    models = Models([ServedModel.from_checkpoint(own, pool, _create_executor) for own in models_settings])
    for model in models:
        model.repositories = repositories(name_elsewhere(Path(model.settings.model)))
    pool.warm_up()  # its libraries load while the engine's do
    traces = start_traces(os.environ)
    app = create_app(settings, models, pool, traces)
    warn_of_small_disk(app.state.server)
    config = server_config(
        app,
        settings,
        root_path=settings.root_path,
        # Below this it says again what is said elsewhere, without a request's id, and writes keys in the log.
        log_level="error" if settings.log_level == "error" else "warning",
        ws=BoundedWebSocketProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # it shrinks base64 of audio by a third: docs/realtime.md
    )
    server = Server(config, app.state.server)
    server.run(machine.sockets_for(settings.host, settings.port, settings.reuse_port))
    if traces is not None:
        traces.close()
    if failed := models.failed_to_start:
        logger.critical("the engine could not be started: %s", failed.dispatcher.supervisor.last_failure)
        return ENGINE_FAILED
    return server.exit_status


def _create_executor(settings: Settings) -> Executor:
    if settings.executor != "ray":
        return create_local_executor(settings)
    from asr_server.annexes.ray.executor import RayExecutor

    return RayExecutor(settings.part(RaySettings))


def start_traces(environment: Mapping[str, str]) -> Traces | None:
    """Trace requests if OpenTelemetry's variables name a collector."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER") == "none"
    named = [name for name in _COLLECTOR if environment.get(name)]
    if is_off or not named:
        return None
    try:
        from asr_server.annexes.monitoring.traces import Traces

        return Traces()
    except ImportError as error:
        logger.warning(
            "%s asks for traces, and none are sent: %s; they are an extra: pip install '.[traces]' in the "
            "checkout",
            named[0],
            error,
        )
        return None


def _warn_of_few_files(limit: int, settings: Settings) -> None:
    needed = FILES_PER_CONNECTION * settings.max_connections + FILES_BESIDE
    if limit < needed:
        logger.warning(
            "the limit of open files (ulimit -n) is %d, and %s, %d, may need %d: raise the limit or lower "
            "the setting",
            limit,
            naming("max_connections"),
            settings.max_connections,
            needed,
        )


def warn_of_small_disk(state: AppState) -> None:
    limit_bytes, wanted_bytes = state.max_upload_bytes, state.settings.max_upload_bytes
    if limit_bytes < wanted_bytes:
        logger.warning(
            "the temporary folder %s has room for uploads of %s, and %s allows %s: larger ones get 413",
            tempfile.gettempdir(),
            in_mebibytes(limit_bytes),
            naming("max_upload_bytes"),
            in_mebibytes(wanted_bytes),
        )


class Server(uvicorn.Server):
    """uvicorn's server that drains while it still answers probes."""

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self._state = state
        self._hurry = False
        self._wyoming: WyomingServer | None = None
        self._wyoming_port = state.settings.part(WyomingSettings).wyoming_port
        self.exit_status = STOPPED
        self._starting: asyncio.Task[None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the address once it listens: port 0 is resolved only then."""
        await super().startup(sockets)
        machine.freeze_gc()
        self._starting = asyncio.create_task(self._stop_if_no_engine_starts())
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self._state.settings.ssl_certfile else "http"
            announce(f"listening on {scheme}://{machine.in_url(host)}:{port}")
            if not self._state.api_keys.required and not machine.is_loopback(self._state.settings.host):
                logger.warning(
                    "no key is asked for on %s: anyone who can reach it can use the server; %s sets one",
                    self._state.settings.host,
                    naming("api_key"),
                )
            try:
                await self._open_wyoming()
            except OSError as error:  # something took the port since the settings were checked
                logger.critical("cannot listen for Wyoming on port %d: %s", self._wyoming_port, error)
                self.should_exit, self.exit_status = True, PORT_TAKEN

    async def _open_wyoming(self) -> None:
        if self._wyoming_port == NO_PORT:
            return
        from asr_server.annexes.wyoming.server import WyomingServer

        self._wyoming = WyomingServer(self._state)
        host, port = await self._wyoming.start()
        announce(f"wyoming on tcp://{machine.in_url(host)}:{port}")
        if self._state.api_keys.required:
            logger.warning("Wyoming has no authentication: anyone who can reach port %d can transcribe", port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at the second. uvicorn would raise the signal again."""
        for model in self._state.models:
            model.dispatcher.supervisor.expect_ends()
        self._hurry = self.should_exit
        self.should_exit = True

    async def _stop_if_no_engine_starts(self) -> None:
        await self._state.models.until_ready()
        self.should_exit |= self._state.models.failed_to_start is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self._state.models.failed_to_start:
            await self._drain()
        if self._wyoming is not None:
            await self._wyoming.close()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        limit_s, started_at = self._state.settings.drain_s, time.monotonic()
        end = started_at + limit_s
        if self._state.settings.reuse_port:  # the other servers take new connections
            for listener in self.servers:
                listener.close()
        logger.info("draining: %d requests in flight have %g s to finish", self._num_in_flight, limit_s)
        for model in self._state.models:
            model.dispatcher.drain()
        sessions = asyncio.create_task(self._state.realtime.drain(limit_s))
        while self._num_in_flight and time.monotonic() < end and not self._hurry:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)  # the handler of a signal cannot set an event
        sessions.cancel()
        drained_s = time.monotonic() - started_at
        if self._num_in_flight:
            logger.warning("drained for %.1f s: %d requests unfinished", drained_s, self._num_in_flight)
            for model in self._state.models:
                model.dispatcher.fail_all(ShuttingDown)
            await self._state.realtime.drain(CLOSE_LIMIT_S)  # each session is sent the end of its turns
        else:
            logger.info("drained in %.1f s: no request is left", drained_s)

    @property
    def _num_in_flight(self) -> int:
        return self._state.admission.num_open + self._state.realtime.num_active
