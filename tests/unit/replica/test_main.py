"""How the process of a replica settles itself before it loads the engine."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from asr_server import __version__
from asr_server.annexes.ray import actor
from asr_server.annexes.ray.tcp import TcpEngineServer, make_curve_keys
from asr_server.channel.zeromq import Address, ReplicaSpec, ZmqEngineServer
from asr_server.replica import main as module
from asr_server.replica.main import CannotStart
from tests.support.checkpoints import pocket_directory
from tests.support.embedded import embedded
from tests.support.forked import Ended, Fork, parent_death_signal

ADDRESS = Address("ipc:///nowhere/events", "ipc:///nowhere/commands")


def state(server: ZmqEngineServer) -> dict[str, Any]:
    return {
        "ignored": [
            number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_IGN
        ],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "is_batch": os.sched_getscheduler(0) == os.SCHED_BATCH,
        "title": Path("/proc/self/cmdline").read_bytes().strip(b"\0").decode(),
        "level": logging.root.level,
        "server": type(server).__name__,
        "parent_death_signal": parent_death_signal(),
    }


def started(spec: ReplicaSpec | None, run: Callable[..., object] | None = None) -> Fork:
    """Run `main` in a copy of this process, with `run` in the engine's place."""

    def work(tell: Callable[[Any], None]) -> None:
        vars(module)["run"] = run or (lambda server, create_engine: tell(state(server)))
        module.main()

    process = Fork(work)
    if spec is not None:
        process.give(spec.to_line())
    return process


def test_a_replica_leaves_stopping_to_the_server_and_dies_with_it() -> None:
    ended = started(ReplicaSpec(3, ADDRESS, embedded(log_level="debug"))).end()
    assert ended.told == {
        "ignored": [signal.SIGINT, signal.SIGTERM],
        "parent_death_signal": signal.SIGKILL,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "is_batch": False,
        "title": "asr-server replica 3",
        "level": logging.DEBUG,
        "server": "ZmqEngineServer",
    }
    assert ended.status == 0


def test_a_replica_on_the_cpu_gives_way() -> None:
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    told = started(ReplicaSpec(0, ADDRESS, embedded(replica_niceness=3), computes_on_cpu=True)).end().told
    assert told["niceness"] == niceness
    assert told["is_batch"] or os.sched_getscheduler(0) != os.SCHED_OTHER


def test_a_replica_ends_when_its_server_does() -> None:
    process = started(ReplicaSpec(0, ADDRESS, embedded()), lambda *_: time.sleep(3600))
    process.give_no_more()
    assert process.end().status == 1


def test_a_replica_whose_server_ends_before_it_sends_settings_ends_without_a_traceback() -> None:
    process = started(None)
    process.give(ReplicaSpec(0, ADDRESS, embedded()).to_line()[:20])
    process.give_no_more()
    assert process.end() == Ended(1, None, "", b"")


def test_the_engine_is_loaded_from_the_checkpoint_of_the_settings() -> None:
    spec = ReplicaSpec(0, ADDRESS, embedded(model=str(pocket_directory()), device="cpu", max_slots=2))
    gc.unfreeze()
    engine = module.create_engine(spec)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000, "no collection looks at what was loaded"
    assert engine.initial_credit().num_slots == 2
    engine.close()


def test_torch_is_loaded_once_the_heartbeat_beats() -> None:
    """To import it takes seconds, in which nobody could tell the process from one that hangs."""
    code = "import asr_server.replica.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- On another host --


def run_actor(spec: ReplicaSpec, version: str = __version__) -> Ended:
    def work(tell: Callable[[Any], None]) -> None:
        def run(server: TcpEngineServer, create_engine: Callable[[], object]) -> None:
            try:
                create_engine()
            except CannotStart as error:
                tell([type(server).__name__, str(error), logging.root.level])
                server.close()

        vars(actor)["run"] = run
        actor.ReplicaActor().run(spec.to_line(), version)

    return Fork(work).end()


@pytest.fixture
def listening() -> Any:
    """An address where somebody takes connections and says nothing."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PULL), context.socket(zmq.PUSH)]
    ours, theirs = make_curve_keys()
    for socket in sockets:
        socket.curve_server, socket.curve_secretkey = True, ours.secret.encode()
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    events, commands = (f"tcp://127.0.0.1:{port}" for port in ports)
    yield Address(events, commands, keys=theirs)
    context.destroy(linger=0)


def test_a_replica_elsewhere_ends_when_its_server_is_lost_and_logs_where_it_is() -> None:
    class Server:
        def __init__(self, address: Address, on_lost: Callable[[], None]) -> None:
            self.on_lost = on_lost

        def log_handler(self) -> logging.Handler:
            return logging.StreamHandler(sys.stderr)

    def work(tell: Callable[[Any], None]) -> None:
        vars(actor).update(TcpEngineServer=Server, run=lambda server, create_engine: server.on_lost())
        actor.ReplicaActor().run(ReplicaSpec(6, ADDRESS, embedded()).to_line(), __version__)

    ended = Fork(work).end()
    assert ended.status == 1
    assert "replica 6" in ended.errors
    assert f"starts on {os.uname().nodename} as process " in ended.errors


def test_a_host_of_another_version_is_refused_by_name() -> None:
    ended = run_actor(ReplicaSpec(0, ADDRESS, embedded()), "0.0.1")
    assert ended.status == 99
    assert f"{os.uname().nodename} has asr-server {__version__}, the server is 0.0.1" in ended.errors


def test_a_checkpoint_that_another_host_lacks_is_told_with_the_hosts_name(
    listening: Address, tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    ended = run_actor(ReplicaSpec(0, listening, embedded(model=missing, log_level="debug")))
    kind, reason, level = ended.told
    assert (kind, level) == ("TcpEngineServer", logging.DEBUG)
    assert reason.startswith(f"on {os.uname().nodename}: ")
    assert missing in reason
