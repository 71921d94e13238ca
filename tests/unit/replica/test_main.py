"""How the process of a replica settles itself before it loads the engine."""

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from asr_server import __version__, replica
from asr_server.annexes.ray import executor as actor
from asr_server.annexes.ray.tcp import TcpEngineServer, make_curve_keys
from asr_server.config import Settings
from asr_server.core import ChunkId, DecodingOptions
from asr_server.engine import Engine
from asr_server.replica import CannotStart, HeartbeatThread, Ranks, RankSpec, load_engine, serve
from asr_server.transport.messages import (
    Cancel,
    Cancelled,
    Command,
    Drain,
    Event,
    Heartbeat,
    LanguageDetected,
    Result,
    SetLanguage,
    StartFailed,
    Submit,
)
from asr_server.transport.zeromq import Address, ReplicaSpec
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint
from tests.support.checkpoints import pocket_directory
from tests.support.embedded import embedded
from tests.support.forked import Ended, Fork, parent_death_signal
from tests.support.until import wait_until as until

ADDRESS = Address("ipc:///nowhere/events", "ipc:///nowhere/commands")


def started(spec: ReplicaSpec | None) -> Fork:
    """Run `main` in a copy of this process, with an engine that never has anything to say."""

    def work(tell: Callable[[Any], None]) -> None:
        vars(replica)["run"] = lambda *_: time.sleep(3600)
        replica.main()

    process = Fork(work)
    if spec is not None:
        process.give(spec.to_line())
    return process


def test_a_replica_ends_when_its_server_does() -> None:
    process = started(ReplicaSpec(0, ADDRESS, embedded()))
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
    engine = replica.create_engine(spec)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000, "no collection looks at what was loaded"
    assert engine.initial_credit().num_slots == 2
    engine.close()


def test_torch_is_loaded_once_the_heartbeat_beats() -> None:
    """To import it takes seconds, in which nobody could tell the process from one that hangs."""
    code = "import asr_server.replica, sys; sys.exit('torch' in sys.modules)"
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

        @property
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


def test_a_checkpoint_missing_elsewhere_is_told_with_the_host(listening: Address, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    ended = run_actor(ReplicaSpec(0, listening, embedded(model=missing, log_level="debug")))
    kind, reason, level = ended.told
    assert (kind, level) == ("TcpEngineServer", logging.DEBUG)
    assert reason.startswith(f"on {os.uname().nodename}: ")
    assert missing in reason


SETTINGS = embedded(tensor_parallel_size=3).core


def with_ranks(rank: str, work: Callable[[Ranks, Callable[[Any], None]], None]) -> Ended:
    """Run `work` in a copy of this process. Its ranks run this function of `tests.unit.replica.short_rank`."""  # noqa: E501

    def run(tell: Callable[[Any], None]) -> None:
        os.environ["PYTHON_SHORT_RANK"] = rank  # inherited
        replica.MODULE = "tests.unit.replica.short_rank"  # type: ignore[misc]
        logging.basicConfig(level="INFO", force=True)
        atexit._clear()  # what the process of the tests leaves for its own end
        started = Ranks(5, SETTINGS, 2)
        work(started, tell)
        end, vars(os)["_exit"] = os._exit, lambda _: time.sleep(60)  # who sees the ranks end ends nothing now
        for each in started.processes:
            each.kill()
        end(0)

    return Fork(run).end()


def test_each_other_rank_is_a_process_that_is_told_who_it_is() -> None:
    def ask(started: Ranks, tell: Callable[[Any], None]) -> None:
        tell([link.recv_bytes().decode() for link in started.links])

    ended = with_ranks("tell_spec", ask)
    specs = [msgspec.json.decode(line, type=RankSpec) for line in ended.told]
    assert [(spec.replica, spec.rank, spec.num_on_device) for spec in specs] == [(5, 1, 2), (5, 2, 2)]
    assert {spec.settings for spec in specs} == {SETTINGS}
    assert len({spec.store_fd for spec in specs}) == 1


def wait(started: Ranks, tell: Callable[[Any], None]) -> None:
    tell([each.pid for each in started.processes])
    time.sleep(3600)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_the_end_of_one_rank_ends_all_and_is_told_with_its_status() -> None:
    ended = with_ranks("rank_2_fails", wait)
    assert ended.status == 1
    assert "ERROR" in ended.errors
    assert "replica 5 rank 2 (pid" in ended.errors
    assert "exited with status 3: the replica ends" in ended.errors
    assert not any(map(is_running, ended.told))


@pytest.mark.parametrize(
    ("given", "own"),
    [("", {}), ("4,5,6", {"CUDA_VISIBLE_DEVICES": "6"}), ("a,b,c", {"CUDA_VISIBLE_DEVICES": "c"})],
)
def test_each_rank_sees_its_gpu(given: str, own: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert replica._device_of(2) == own


# -- The process of a rank --


def test_a_rank_settles_itself_and_ends_with_rank_0() -> None:
    spec = RankSpec(4, 2, embedded(log_level="debug"), 1, 3, 4)

    def work(tell: Callable[[Any], None]) -> None:
        spec = replica.settled(RankSpec)
        ignored = [signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]
        title = Path("/proc/self/cmdline").read_bytes().strip(b"\0").decode()
        logging.getLogger("asr_server").warning("loads")
        keeps_alive = [each.name for each in threading.enumerate() if not each.daemon][1:]
        tell([ignored, title, logging.root.level, spec.rank, parent_death_signal(), keeps_alive])
        time.sleep(3600)

    process = Fork(work)
    process.give(spec.to_line())
    assert os.read(process._told, 65536) == b'[[true, true], "asr-server replica 4 rank 2", 10, 2, 9, []]'
    process.give_no_more()  # rank 0 has ended
    ended = process.end()
    assert ended.status == 1
    assert "replica 4 rank 2" in ended.errors


@pytest.fixture(scope="module")
def pocket() -> Checkpoint:
    return Checkpoint.load(pocket_directory())


class Server:
    """Keeps what the replica sends, and answers it from a list of commands a call."""

    def __init__(self, *commands: list[Command]) -> None:
        self.commands = list(commands)
        self.sent: list[Event] = []
        self.beats: list[Heartbeat] = []
        self.waited: list[float] = []
        self.is_closed = False

    def receive(self, wait_s: float) -> list[Command]:
        self.waited.append(wait_s)
        return self.commands.pop(0) if self.commands else []

    def send(self, event: Event) -> None:
        if isinstance(event, Heartbeat):
            self.beats.append(event)
            return
        self.sent.append(event)
        if isinstance(event, LanguageDetected):  # chosen only once the engine drains
            self.commands += [[Drain()], [], [SetLanguage(event.id, "de")]]

    def close(self) -> None:
        assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
        self.is_closed = True


def settings_of(directory: str, **values: Any) -> Settings:
    return embedded(model=directory, device="cpu", max_slots=2, **values)


def test_a_replica_that_drains_still_decodes_a_chunk_that_waits_for_its_language(pocket: Checkpoint) -> None:
    submit = Submit(ChunkId("a", 0), make_clip(0, 1.0), DecodingOptions(max_new_tokens=4))
    server = Server([submit])
    serve(pocket.engine(), server)
    assert [event.id for event in server.sent if isinstance(event, Result)] == [submit.id]


def test_a_cancelled_request_is_acknowledged_behind_its_last_event(pocket: Checkpoint) -> None:
    """Until then the API process must take it for running."""
    submit = Submit(ChunkId("a", 0), make_clip(0, 1.0), DecodingOptions(language="en"))
    server, engine = Server([submit], [Cancel("a")], [Drain()]), pocket.engine()
    serve(engine, server)
    assert server.sent[-1] == Cancelled("a")
    assert not [event for event in server.sent if isinstance(event, Result)]
    assert not engine.slots_in_use


def test_a_replica_offers_its_slots_waits_only_without_work_and_ends_when_drained(pocket: Checkpoint) -> None:
    submit = Submit(ChunkId("a", 0), make_clip(0, 1.0), DecodingOptions(language="en", max_new_tokens=4))
    server, engine = Server([], [submit], [Drain()]), pocket.engine()
    offered = engine.initial_credit()
    serve(engine, server)
    assert server.sent[0] == offered
    assert [event.id for event in server.sent if isinstance(event, Result)] == [submit.id]
    assert server.waited[:3] == [0.5, 0.5, 0.0]
    assert set(server.waited[2:]) == {0.0}
    assert not engine.slots_in_use


def test_heartbeats_come_before_the_engine_is_there_and_then_tell_of_its_steps(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "HEARTBEAT_S", 0.001)
    submit = Submit(ChunkId("a", 0), make_clip(0, 1.0), DecodingOptions(language="en", max_new_tokens=4))
    server, engine = Server([submit], [Drain()]), pocket.engine()
    beating = HeartbeatThread(server)
    assert (beating.name, beating.daemon) == ("heartbeat", True)
    beating.start()
    until(lambda: server.beats)
    assert server.beats[0] == Heartbeat(0)
    serve(engine, server)
    beating.engine = engine
    last = engine.heartbeat()
    assert last.num_steps > 0
    assert last.num_decoded_tokens > 0
    until(lambda: server.beats[-1] == last)
    beating.stop()
    assert not beating.is_alive()


def test_a_replica_closes_its_engine_and_its_end_when_it_is_drained(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, closed, server = pocket.engine(), [], Server([Drain()])
    monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    replica.run(server, lambda: engine)
    assert closed == [True]
    assert server.sent == [engine.initial_credit()], "it has offered its slots until then"
    assert server.is_closed
    assert server.beats


def test_an_engine_that_cannot_start_is_told_and_the_replica_waits_for_its_end() -> None:
    def fail() -> Engine:
        raise CannotStart("no such device")

    server = Server()
    replica.run(server, fail)
    assert server.sent == [StartFailed("no such device")]
    assert server.waited == [30.0]
    assert server.is_closed


def test_another_error_of_the_start_is_not_hidden_and_leaves_no_thread() -> None:
    def fail() -> Engine:
        raise ZeroDivisionError

    server = Server()
    with pytest.raises(ZeroDivisionError):
        replica.run(server, fail)
    assert (server.sent, server.is_closed) == ([], True)


def test_other_ranks_are_started_only_where_the_model_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start_ranks(*about: object) -> None:
        started.append(about)
        raise OSError("no more processes,\n  it seems")

    monkeypatch.setattr(replica, "Ranks", start_ranks)
    directory = str(pocket_directory())
    load_engine(settings_of(directory), 1, 4).close()
    load_engine(settings_of(directory, tensor_parallel_size=2), 1).close()  # a replica that has no others
    with pytest.raises(CannotStart, match="must divide"):
        load_engine(settings_of(directory, tensor_parallel_size=3), 1, 4)
    assert not started
    with pytest.raises(CannotStart, match=r"^no more processes, it seems$"):
        load_engine(settings_of(directory, tensor_parallel_size=2), 1, 4)
    assert [about[0] for about in started] == [4]
