"""Start a replica in a Ray cluster.

Ray carries the call of `run` alone; messages use our own connection. The replica ends when that breaks.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from asr_server import __version__
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.annexes.ray.tcp import TcpEngineServer
from asr_server.channel.zeromq import ReplicaSpec
from asr_server.errors import CheckpointError
from asr_server.replica.main import CannotStart, create_engine, run
from asr_server.telemetry import configure_logging

if TYPE_CHECKING:
    from asr_server.engine import Engine

_HOST: Final = os.uname().nodename

logger = logging.getLogger(__name__)


class ReplicaActor:
    def run(self, spec_line: bytes, version: str) -> None:
        """Serve until drained. The server's `version` must be this host's."""
        if version != __version__:
            raise RuntimeError(f"{_HOST} has asr-server {__version__}, the server is {version}")
        spec = ReplicaSpec.from_line(spec_line)
        server = TcpEngineServer(spec.address, on_lost=lambda: os._exit(1))
        settings, name = spec.settings, f"replica {spec.index}"
        configure_logging(settings.log_level, settings.log_format, name, server.log_handler())
        logger.info("starts on %s as process %d", _HOST, os.getpid())
        run(server, lambda: _create_engine_from_here(spec))


def _create_engine_from_here(spec: ReplicaSpec) -> Engine:
    try:
        model = resolve_checkpoint(spec.settings.model)
    except CheckpointError as error:
        raise CannotStart(f"on {_HOST}: {error}") from error
    return create_engine(msgspec.structs.replace(spec, settings=replace(spec.settings, model=str(model))))
