"""The process of a replica: commands in, steps of its engine, events and heartbeats out.

`python -m asr_server.replica.main` starts one on this host; its settings come by standard input, as everybody
can read a process's arguments. Other executors call `run`. Imports torch only to load the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from asr_server.channel.messages import (
    HEARTBEAT_S,
    Cancel,
    Cancelled,
    EngineServer,
    Event,
    Failed,
    Heartbeat,
    Result,
    StartFailed,
)
from asr_server.channel.zeromq import ReplicaSpec, ZmqEngineServer
from asr_server.config import Settings
from asr_server.errors import CheckpointError
from asr_server.machine import freeze_gc, gc_paused, lower_priority, never_interrupt_others
from asr_server.process import be_killed_with_the_parent, end_with_the_parent, leave_stopping_to_the_parent
from asr_server.replica.ranks import Ranks
from asr_server.telemetry import configure_logging, working_for

if TYPE_CHECKING:
    from asr_server.engine import Engine

IDLE_WAIT_S = 0.5
END_LIMIT_S = 30.0
NICENESS = 5  # above the server's: beside a busy machine a quarter of what others get; 10 is a tenth
MAX_REASON_CHARS = 400  # torch lists every weight that does not fit

logger = logging.getLogger("asr_server.replica.main")  # `__main__` in a process of its own


class CannotStart(Exception):
    """The engine cannot be loaded; the message gives the reason in one line."""


def load_engine(settings: Settings, num_on_device: int, replica: int | None = None) -> Engine:
    """Load the engine of one of `num_on_device` replicas; one with a number may start other ranks.

    Raises CannotStart where another try would fail too.
    """
    from asr_server.engine import Engine, EngineConfig  # torch: seconds, while the heartbeat already beats
    from asr_server.engine.ranks import check_ranks, join

    config = EngineConfig.from_settings(settings, num_on_device)
    try:
        if config.num_ranks == 1 or replica is None:
            return Engine.load(config)
        check_ranks(config)
        ranks = Ranks(replica, settings, num_on_device)
        shard = join(config, 0, ranks.store, ranks.links)
        return Engine.load(config, ranks.broadcast, shard)
    except (CheckpointError, ValueError, OSError) as error:
        logger.debug("the engine cannot be started", exc_info=error)
        raise CannotStart(" ".join(str(error).split())[:MAX_REASON_CHARS]) from error


def run(server: EngineServer, create_engine: Callable[[], Engine]) -> None:
    heartbeat = HeartbeatThread(server)
    heartbeat.start()
    try:
        heartbeat.engine = create_engine()
        serve(heartbeat.engine, server)
    except CannotStart as error:
        server.send(StartFailed(str(error)))
        server.receive(wait_s=END_LIMIT_S)  # whoever gets this ends the replica
    finally:
        if heartbeat.engine is not None:
            heartbeat.engine.close()
        heartbeat.stop()
        server.close()


def serve(engine: Engine, server: EngineServer) -> None:
    """Take commands, step the engine, send events; return when drained."""
    server.send(engine.initial_credit())
    while engine.has_work or engine.slots_in_use or not engine.draining:
        commands = server.receive(wait_s=0.0 if engine.has_work else IDLE_WAIT_S)
        for command in commands:
            engine.handle(command)
        for event in engine.step():
            server.send(event)
            _log(event)
        for command in commands:
            if isinstance(command, Cancel):
                server.send(Cancelled(command.request_id, command.id))


def _log(event: Event) -> None:
    match event:
        case Result(id, result):
            with working_for(id):
                logger.debug(
                    "chunk %d, part %d: %d tokens at temperature %g",
                    *(id.chunk, id.part, len(result.tokens), result.temperature),
                )
        case Failed(id, message):
            with working_for(id):
                logger.warning("chunk %d, part %d failed: %s", id.chunk, id.part, message)


class HeartbeatThread(threading.Thread):
    """Send heartbeats in any case, to distinguish a frozen engine from a busy one."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.engine: Engine | None = None
        self._server = server
        self._stopped = threading.Event()

    def run(self) -> None:
        self._server.send(self._state())
        while not self._stopped.wait(HEARTBEAT_S):
            self._server.send(self._state())

    def _state(self) -> Heartbeat:
        return Heartbeat(num_steps=0) if self.engine is None else self.engine.heartbeat()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def main() -> None:
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    spec = ReplicaSpec.from_parent()
    if spec.computes_on_cpu:  # it uses every core, and the API process must get one at once
        lower_priority(NICENESS)
        never_interrupt_others()
    setproctitle(f"asr-server replica {spec.index}")
    configure_logging(spec.settings.log_level, spec.settings.log_format, f"replica {spec.index}")
    end_with_the_parent()
    run(ZmqEngineServer(spec.address), lambda: create_engine(spec))


def create_engine(spec: ReplicaSpec) -> Engine:
    with gc_paused():
        engine = load_engine(spec.settings, spec.num_on_device, spec.index)
        freeze_gc()
    return engine


if __name__ == "__main__":
    main()
