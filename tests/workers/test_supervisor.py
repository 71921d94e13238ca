import asyncio

import pytest

from asr_server.core import ChunkId, Credit, Event, Heartbeat
from asr_server.workers import supervisor
from asr_server.workers.executor import ReplicaGone
from asr_server.workers.supervisor import HUNG_AFTER_S, ReplicaState, Supervisor
from tests.workers.scripted import ScriptedExecutor, ScriptedReplica


def busy_link(since: float) -> ReplicaState:
    state = ReplicaState(ScriptedReplica("replica 0", 0), ready=True, progress_at=since)
    state.in_flight.add(ChunkId("a", 0))
    return state


async def test_a_replica_with_work_that_takes_no_step_is_hung() -> None:
    state = busy_link(since=100.0)
    state.on_heartbeat(Heartbeat(0), now=100.0 + HUNG_AFTER_S)
    with pytest.raises(ReplicaGone, match="hung"):
        state.on_heartbeat(Heartbeat(0), now=101.0 + HUNG_AFTER_S)


async def test_an_idle_replica_is_never_hung() -> None:
    state = busy_link(since=100.0)
    state.in_flight.clear()
    state.on_heartbeat(Heartbeat(0), now=100_000.0)


async def test_long_steps_stretch_the_patience() -> None:
    state = busy_link(since=100.0)
    state.on_heartbeat(Heartbeat(1), now=120.0)  # a step of 20 s: patience is now 200 s
    state.on_heartbeat(Heartbeat(1), now=120.0 + 199.0)
    with pytest.raises(ReplicaGone, match="hung"):
        state.on_heartbeat(Heartbeat(1), now=120.0 + 201.0)


async def test_a_silent_replica_is_frozen_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_AFTER_S", 0.05)
    executor = ScriptedExecutor()
    events: list[Event] = []
    keeper = Supervisor(
        executor,
        1,
        lambda state, event: events.append(event),
        lambda state: None,
        lambda: None,
    )
    keeper.start()
    async with asyncio.timeout(10):
        while len(executor.launched) < 2:
            await asyncio.sleep(0.01)
    await keeper.stop()
    assert executor.launched[0].closed
    assert events[0] == Credit(1)
