import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from asr_server.channel.messages import Credit, Event, Heartbeat
from asr_server.dispatch.supervisor import (
    MAX_FAILED_STARTS,
    USUAL_LIMITS,
    ReplicaGone,
    ReplicaLimits,
    ReplicaState,
    Supervisor,
)
from tests.dispatch.scripted import ScriptedExecutor, ScriptedReplica

Start = Callable[..., Supervisor]
FAST = ReplicaLimits(tick_s=0.01, pause_s=0.0)


def new_state(ready: bool = True) -> ReplicaState:
    state = ReplicaState(ScriptedReplica("replica 0", 0))
    if ready:
        state.on_ready()
    return state


def pass_time(state: ReplicaState, duration_s: float, num_steps: int | None = None) -> None:
    """With heartbeats, if `num_steps` is given."""
    for _ in range(round(duration_s / USUAL_LIMITS.tick_s)):
        if num_steps is not None:
            state.on_heard()
            state.on_heartbeat(Heartbeat(num_steps))
        state.on_tick()


def test_a_replica_that_takes_no_step_is_hung() -> None:
    state = new_state()
    pass_time(state, USUAL_LIMITS.hung_after_s, num_steps=0)
    with pytest.raises(ReplicaGone, match="hung"):
        pass_time(state, 1.0, num_steps=0)


def test_a_replica_that_takes_steps_is_not_hung() -> None:
    state = new_state()
    for num_steps in range(100):
        pass_time(state, 1.0, num_steps)


def test_long_steps_stretch_the_patience() -> None:
    state = new_state()
    pass_time(state, 20.0, num_steps=0)
    pass_time(state, 199.0, num_steps=1)  # a step of 20 s: patience is now 200 s
    with pytest.raises(ReplicaGone, match="hung"):
        pass_time(state, 2.0, num_steps=1)


def test_a_silent_replica_is_frozen() -> None:
    state = new_state()
    pass_time(state, USUAL_LIMITS.frozen_after_s)
    with pytest.raises(ReplicaGone, match="frozen"):
        pass_time(state, 1.0)


def test_the_limit_of_a_start_counts_from_the_launch_whatever_is_heard() -> None:
    state = new_state(ready=False)
    pass_time(state, USUAL_LIMITS.startup_s, num_steps=0)
    with pytest.raises(ReplicaGone, match="not ready 900 s after its launch"):
        pass_time(state, 1.0, num_steps=0)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a supervisor whose clock runs fast."""
    started: list[Supervisor] = []

    def start(
        executor: ScriptedExecutor,
        on_events: Callable[[ReplicaState, list[Event]], None],
        limits: ReplicaLimits = FAST,
    ) -> Supervisor:
        started.append(Supervisor(executor, on_events, lambda state: None, lambda: None, limits))
        started[0].start()
        return started[0]

    yield start
    await started[0].stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_frozen_replica_is_replaced(start: Start) -> None:
    executor, events = ScriptedExecutor(), list[Event]()
    start(executor, lambda state, come: events.extend(come), replace(FAST, frozen_after_s=0.05))
    await until(lambda: len(executor.launched) == 2)
    assert executor.launched[0].closed
    assert events[0] == Credit(1)


async def test_the_log_says_when_a_lost_replica_is_back(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.dispatch.supervisor")
    executor = ScriptedExecutor()
    start(executor, lambda state, event: None)
    await until(lambda: executor.launched)
    executor.launched[0].die()
    await until(lambda: len(executor.launched) == 2 and len(caplog.messages) == 2)
    assert caplog.messages == ["replica 0", "replica 0 is back"]  # why it was lost, and then


async def test_a_start_that_stalls_is_given_up_although_its_heart_beats(start: Start) -> None:
    executor = ScriptedExecutor(credit=0)
    keeper = start(executor, lambda state, event: None, replace(FAST, startup_s=0.2))
    async with asyncio.timeout(10):
        while not keeper.given_up:
            if executor.launched:
                executor.launched[-1].say(Heartbeat(0))
            await asyncio.sleep(0.01)
    assert len(executor.launched) == MAX_FAILED_STARTS
    assert not keeper.was_ready


async def test_a_pause_of_this_process_ends_no_replica(start: Start) -> None:
    executor = ScriptedExecutor()
    keeper = start(executor, lambda state, event: None, replace(FAST, frozen_after_s=0.2))
    await until(lambda: keeper.was_ready)
    for _ in range(3):
        time.sleep(0.4)  # noqa: ASYNC251  one callback that keeps the loop busy
        executor.launched[0].say(Heartbeat(1))
        await asyncio.sleep(0.05)
    assert len(executor.launched) == 1
    assert not executor.launched[0].closed


class FailingExecutor(ScriptedExecutor):
    """Its first launches raise."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    async def launch(self, index: int) -> ScriptedReplica:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(24, "Too many open files")
        return await super().launch(index)


async def test_a_launch_that_raises_is_tried_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        keeper = start(FailingExecutor(MAX_FAILED_STARTS - 1), lambda state, event: None)
        await until(lambda: keeper.was_ready)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["replica 0 failed: OSError: [Errno 24] Too many open files"] * (MAX_FAILED_STARTS - 1)
    assert not any(record.exc_info for record in caplog.records)


async def test_launches_that_keep_raising_are_given_up(start: Start) -> None:
    keeper = start(FailingExecutor(MAX_FAILED_STARTS), lambda state, event: None)
    await until(lambda: keeper.given_up)
    assert not keeper.was_ready
    assert "Too many open files" in keeper.last_failure


async def test_an_error_of_ours_while_watching_ends_the_replica_and_counts_as_a_failed_start(
    start: Start,
) -> None:
    def on_event(state: ReplicaState, event: Event) -> None:
        raise ZeroDivisionError

    executor = ScriptedExecutor()
    keeper = start(executor, on_event)
    await until(lambda: keeper.given_up)
    assert [replica.closed for replica in executor.launched] == [True] * MAX_FAILED_STARTS
    assert not keeper.replica_states


async def test_a_replica_that_ends_while_draining_is_not_replaced(start: Start) -> None:
    executor = ScriptedExecutor()
    keeper = start(executor, lambda state, event: None)
    await until(lambda: keeper.was_ready)
    keeper.drain()
    executor.launched[0].die()
    await until(lambda: keeper.given_up)
    assert len(executor.launched) == 1
