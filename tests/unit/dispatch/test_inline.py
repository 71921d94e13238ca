"""A replica in a thread of this process."""

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asr_server.dispatch import executors
from asr_server.dispatch.executors import InlineExecutor, InlineReplica
from asr_server.dispatch.supervisor import ReplicaGone
from asr_server.transport.messages import Cancel, Command, Credit, Drain, Event
from tests.support.embedded import embedded


@pytest.mark.parametrize(("settings", "expected"), [({"replicas": 3}, 3), ({}, 1)])
async def test_there_are_as_many_as_are_asked_for(settings: dict[str, int], expected: int) -> None:
    executor = InlineExecutor(embedded(**settings))
    assert await executor.start() == expected
    await executor.stop()


class Served:
    """What the thread runs: takes commands until it is drained."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.may_end, self.loaded = threading.Event(), list[int]()

    def run(self, server: Any, load: Callable[[], object]) -> None:
        load()
        server.send(Credit(2))
        while True:
            self.commands += server.receive(60)
            if isinstance(self.commands[-1], Drain):
                assert self.may_end.wait(60)
                return
            raise ZeroDivisionError("of ours")

    def load(self, settings: Any, num_on_device: int) -> None:
        self.loaded.append(num_on_device)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    monkeypatch.setattr(executors, "run", served.run)
    monkeypatch.setattr(executors, "load_engine", served.load)
    return served


@pytest.fixture
async def replica(served: Served) -> AsyncIterator[InlineReplica]:
    yield await InlineExecutor(embedded(replicas=2)).launch(1)
    served.may_end.set()


async def test_an_error_in_its_thread_ends_it_and_is_logged(
    replica: InlineReplica, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Event] = await replica.receive()
    assert received == [Credit(2)]
    replica.send(Cancel("a"))
    with pytest.raises(ReplicaGone, match="replica 1 has ended"):
        await replica.receive()
    assert served.commands == [Cancel("a")]
    assert [record.getMessage() for record in caplog.records] == ["replica 1 has failed"]
    assert caplog.records[0].exc_info is not None
    await replica.close()
