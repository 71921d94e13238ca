"""The processes of a replica: commands in, steps of its engine, events and heartbeats out.

`python -m asr_server.replica` starts one on this host; its settings come by standard input, as everybody can
read a process's arguments. Other executors call `run`. Imports torch only to load the engine. Speaks to the
API process through `transport` alone. Knows no text: only tokens leave it.

With tensor parallelism the process is rank 0, which starts and ends the others (`Ranks`). When one ends,
rank 0 ends all, and the replica is replaced; when one freezes, rank 0 makes no progress. Operations go
through a connection to each rank, and so do sums on the CPU.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, TypeVar

from setproctitle import setproctitle

from asr_server.config import Settings
from asr_server.errors import CheckpointError
from asr_server.machine import exit_reason, freeze_gc, gc_paused, lower_priority, never_interrupt_others
from asr_server.process import (
    be_killed_with_the_parent,
    child_environment,
    end_with_the_parent,
    leave_stopping_to_the_parent,
)
from asr_server.telemetry import configure_logging, working_for
from asr_server.transport.messages import (
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
from asr_server.transport.zeromq import ChildSpec, ReplicaSpec, ZmqEngineServer

if TYPE_CHECKING:
    from asr_server.engine import Engine

IDLE_WAIT_S = 0.5
END_LIMIT_S = 30.0
NICENESS = 5  # above the server's: beside a busy machine a quarter of what others get; 10 is a tenth
MAX_REASON_CHARS = 400  # torch lists every weight that does not fit

Spec = TypeVar("Spec", "ReplicaSpec", "RankSpec")

logger = logging.getLogger("asr_server.replica")  # `__main__` in a process of its own


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
                server.send(Cancelled(command.handle_id, command.id))


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
    """Send heartbeats in any case, to distinguish a frozen process from a busy one."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.engine: Engine | None = None
        self._server = server
        self._stopped = threading.Event()

    def run(self) -> None:
        has_stopped = False
        while not has_stopped:
            self._server.send(Heartbeat(num_steps=0) if self.engine is None else self.engine.heartbeat())
            has_stopped = self._stopped.wait(HEARTBEAT_S)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def main() -> None:
    spec = settled(ReplicaSpec)
    if spec.computes_on_cpu:  # it uses every core, and the API process must get one at once
        lower_priority(NICENESS)
        never_interrupt_others()
    run(ZmqEngineServer(spec.address), lambda: create_engine(spec))


def settled(kind: type[Spec]) -> Spec:
    """Settle this process as a child of its server, or of rank 0; return what it is to do."""
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    spec = kind.from_parent()
    setproctitle(f"asr-server {spec.name}")
    configure_logging(spec.settings.log_level, spec.settings.log_format, spec.name)
    end_with_the_parent()
    return spec


def create_engine(spec: ReplicaSpec) -> Engine:
    with gc_paused():
        engine = load_engine(spec.settings, spec.num_on_device, spec.index)
        freeze_gc()
    return engine


# -- Other ranks ---------------------------------------------------------------------------------------------

MODULE: Final = "asr_server.replica"
RANK: Final = "rank"  # the argument of another rank's process
WATCH_LIMIT_S: Final = 0.5


class RankSpec(ChildSpec, frozen=True):
    replica: int
    rank: int
    settings: Settings
    num_on_device: int
    store_fd: int  # where the ranks find each other, in memory
    link_fd: int  # of a connection to rank 0

    @property
    def name(self) -> str:
        return f"replica {self.replica} rank {self.rank}"


class Ranks:
    """Ranks 1 and up. Create it in the main thread: they end with it."""

    def __init__(self, replica: int, settings: Settings, num_on_device: int) -> None:
        store_fd = os.memfd_create("ranks")
        self.store = store_path(store_fd)
        self.links: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, settings.tensor_parallel_size):
            link, theirs = Pipe()
            spec = RankSpec(replica, rank, settings, num_on_device, store_fd, theirs.fileno())
            self.links.append(link)
            self.processes.append(_start(spec))
            theirs.close()
            watch = threading.Thread(
                target=self._watch,
                args=(spec.name, self.processes[-1]),
                name=f"watch {spec.name}",
                daemon=True,
            )
            watch.start()
        # Where a rank's end is an error here first, its watch still has the time to name it in the log and to
        # end this process. To wait for one watch gives all of them that time.
        atexit.register(watch.join, WATCH_LIMIT_S)

    def broadcast(self, message: object) -> None:
        """Send to every rank; wait for a slow one. Raises OSError when one has ended."""
        for link in self.links:
            link.send(message)

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Never return: end this process, which the supervisor replaces."""
        reason = exit_reason(process.wait())
        logger.error("%s (pid %d) %s: the replica ends", name, process.pid, reason)
        for each in self.processes:
            each.kill()
        os._exit(1)


def _start(spec: RankSpec) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # nosec B603 # our own module, without a shell
        [sys.executable, "-m", MODULE, RANK],
        stdin=subprocess.PIPE,
        env=child_environment() | _device_of(spec.rank),
        pass_fds=(spec.store_fd, spec.link_fd),
        start_new_session=True,  # Ctrl-C is the server's business
    )
    assert process.stdin is not None
    process.stdin.write(spec.to_line())
    process.stdin.flush()
    return process


def store_path(store_fd: int) -> str:
    return f"/proc/self/fd/{store_fd}"


def _device_of(rank: int) -> dict[str, str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": given.split(",")[rank]} if given else {}


def run_rank(spec: RankSpec) -> None:
    with gc_paused():
        from asr_server.engine.config import EngineConfig, load  # torch
        from asr_server.engine.ranks import follow, join

        config, link = EngineConfig.from_settings(spec.settings, spec.num_on_device), Connection(spec.link_fd)
        shard = join(config, spec.rank, store_path(spec.store_fd), [link])
        loaded = load(config, shard)
        freeze_gc()
    follow(loaded, link)


if __name__ == "__main__":
    run_rank(settled(RankSpec)) if sys.argv[1:] == [RANK] else main()
