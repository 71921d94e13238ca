"""Start a replica: `python -m asr_server.replica.main` here, `ReplicaActor` in a Ray cluster.

Settings come by standard input: everybody can read a process's arguments. Ray carries the call of `run`
only; messages use our own connection. The replica ends when that breaks.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from setproctitle import setproctitle

from asr_server import __version__
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.channel.tcp import TcpEngineServer
from asr_server.channel.zeromq import ReplicaSpec, ZmqEngineServer
from asr_server.errors import CheckpointError
from asr_server.machine import freeze_gc, gc_paused, lower_priority, never_interrupt_others
from asr_server.process import be_killed_with_the_parent, end_with_the_parent, leave_stopping_to_the_parent
from asr_server.replica.loop import CannotStart, load_engine, run
from asr_server.replica.ranks import Ranks
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


def main() -> None:
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    spec = ReplicaSpec.from_line(sys.stdin.buffer.readline())
    if spec.computes_on_cpu:  # it uses every core, and the API process must get one at once
        lower_priority(spec.settings.replica_niceness)
        never_interrupt_others()
    setproctitle(f"asr-server replica {spec.index}")
    configure_logging(spec.settings.log_level, spec.settings.log_format, f"replica {spec.index}")
    end_with_the_parent()
    run(ZmqEngineServer(spec.address), lambda: create_engine(spec))


def create_engine(spec: ReplicaSpec) -> Engine:
    start_ranks = partial(Ranks, spec.index, spec.settings, spec.num_on_device)
    with gc_paused():
        engine = load_engine(spec.settings, spec.num_on_device, start_ranks)
        freeze_gc()
    return engine


if __name__ == "__main__":
    main()
