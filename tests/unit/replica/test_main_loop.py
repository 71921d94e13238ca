"""The loop of a replica, with a real engine in this process."""

import threading
from typing import Any

import pytest

from asr_server import replica
from asr_server.channel.messages import (
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
from asr_server.config import Settings
from asr_server.core import ChunkId, DecodingOptions
from asr_server.engine import Engine
from asr_server.replica import CannotStart, HeartbeatThread, load_engine, serve
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint
from tests.support.checkpoints import pocket_directory
from tests.support.embedded import embedded
from tests.support.until import wait_until as until


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
