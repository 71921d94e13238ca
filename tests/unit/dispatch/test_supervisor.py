import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from asr_server import metrics
from asr_server.dispatch.supervisor import (
    MAX_FAILED_STARTS,
    USUAL_LIMITS,
    Executor,
    Patience,
    ReplicaGone,
    ReplicaLimits,
    ReplicaState,
    StartImpossible,
    Supervisor,
)
from asr_server.transport.messages import Credit, Event, Heartbeat
from tests.support.until import until
from tests.unit.dispatch.scripted import ScriptedExecutor, ScriptedReplica

Start = Callable[..., Supervisor]
FAST = ReplicaLimits(tick_s=0.01, pause_s=0.0)


def new_state(ready: bool = True) -> ReplicaState:
    state = ReplicaState(ScriptedReplica("replica 0", 0))
    if ready:
        state.on_ready()
    return state


def pass_time(
    state: ReplicaState, duration_s: float, num_steps: int | None = None, num_layers: int = 0
) -> None:
    """With heartbeats, if `num_steps` is given."""
    for _ in range(round(duration_s / USUAL_LIMITS.tick_s)):
        if num_steps is not None:
            state.on_heard()
            state.on_heartbeat(Heartbeat(num_steps, num_layers=num_layers))
        state.on_tick()


async def test_how_long_the_start_took_is_known_once_a_replica_is_ready(start: Start) -> None:
    executor = ScriptedExecutor(credit=0)
    keeper = start(executor)
    assert (keeper.start_s, keeper.was_ready, keeper.given_up) == (0.0, False, False)
    await until(lambda: keeper.replica_states and keeper.replica_states[0].watched_s > 0.05)
    executor.launched[0].say(Credit(2, num_slots=3))
    executor.launched[0].say(Credit(1))
    await until(lambda: keeper.replica_states[0].credit == 3)
    assert keeper.start_s == keeper.replica_states[0].ready_at_s > 0.05
    assert keeper.replica_states[0].num_slots == 3, "the first credit says how many"


def test_layers_within_a_step_are_progress() -> None:
    state = new_state()
    for num_layers in range(100):
        pass_time(state, 10.0, num_steps=1, num_layers=num_layers)
    with pytest.raises(ReplicaGone, match="hung"):
        pass_time(state, 110.0, num_steps=1, num_layers=99)


def test_long_waits_for_progress_stretch_the_patience() -> None:
    state = new_state()
    pass_time(state, 20.0, num_steps=0)
    pass_time(state, 199.0, num_steps=1)  # after a wait of 20 s patience is 200 s
    with pytest.raises(ReplicaGone, match="hung"):
        pass_time(state, 2.0, num_steps=1)


def test_each_hang_doubles_the_patience_within_a_bound() -> None:
    patience, waits_s = Patience(), list[float]()
    for _ in range(7):
        state = ReplicaState(ScriptedReplica("replica 0", 0), patience=patience)
        state.on_ready()
        with pytest.raises(ReplicaGone, match="hung"):
            pass_time(state, 2000.0, num_steps=0)
        waits_s.append(state.watched_s)
    assert waits_s == pytest.approx([30.5, 61.5, 123.5, 247.5, 495.5, 600.5, 600.5])


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a supervisor whose clock runs fast."""
    started: list[Supervisor] = []

    def start(
        executor: Executor,
        on_events: Callable[[ReplicaState, list[Event]], None] = lambda state, events: None,
        limits: ReplicaLimits = FAST,
    ) -> Supervisor:
        started.append(Supervisor(executor, on_events, lambda state: None, lambda: None, limits))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        await each.stop()


def restarts(reason: str) -> float:
    return metrics.REGISTRY.get_sample_value("asr_replica_restarts_total", {"reason": reason}) or 0.0


async def test_restarts_are_counted_by_their_reason(start: Start) -> None:
    reasons = ("exited", "frozen", "hung", "not_ready", "failed_start")
    before = {reason: restarts(reason) for reason in reasons}
    executor = FailingExecutor(1)
    limits = replace(FAST, frozen_after_s=0.2, hung_after_s=0.5, startup_s=0.3)
    keeper = start(executor, limits=limits)

    async def launched(number: int) -> ScriptedReplica:
        await until(lambda: len(executor.launched) == number and keeper.replica_states)
        return executor.launched[-1]

    async def beat_until_it_ends(replica: ScriptedReplica) -> None:
        while not replica.closed:
            replica.say(Heartbeat(0))
            await asyncio.sleep(0.01)

    first = await launched(1)
    await until(lambda: keeper.was_ready)
    first.die()
    await launched(2)  # which says nothing more
    without_progress = await launched(3)
    executor.credit = 0  # the next ones never become ready
    await beat_until_it_ends(without_progress)
    await beat_until_it_ends(await launched(4))
    (await launched(5)).die()
    await launched(6)
    grown = {reason: restarts(reason) - before[reason] for reason in reasons}
    assert grown == {"exited": 1, "frozen": 1, "hung": 1, "not_ready": 1, "failed_start": 2}


async def test_the_log_says_that_a_replica_is_back(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.dispatch.supervisor")
    executor = ScriptedExecutor()
    start(executor)
    await until(lambda: executor.launched)
    executor.launched[0].die()
    await until(lambda: len(executor.launched) == 2 and len(caplog.messages) == 2)
    assert caplog.messages == ["replica 0", "replica 0 is back"]  # why it was lost, and then


async def test_a_pause_of_this_process_ends_no_replica(start: Start) -> None:
    executor = ScriptedExecutor()
    keeper = start(executor, limits=replace(FAST, frozen_after_s=0.2))
    await until(lambda: keeper.was_ready)
    for _ in range(3):
        time.sleep(0.4)  # noqa: ASYNC251  one callback that keeps the loop busy
        executor.launched[0].say(Heartbeat(1))
        await asyncio.sleep(0.05)
    assert len(executor.launched) == 1
    assert not executor.launched[0].closed


class FailingExecutor(ScriptedExecutor):
    """Its next launches raise."""

    def __init__(self, num_failures: int, reason: Exception | None = None) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.reason = reason or OSError(24, "Too many open files")

    async def launch(self, index: int) -> ScriptedReplica:
        if self.num_failures:
            self.num_failures -= 1
            raise self.reason
        return await super().launch(index)


async def test_a_launch_that_raises_is_tried_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        keeper = start(FailingExecutor(MAX_FAILED_STARTS - 1))
        await until(lambda: keeper.was_ready)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["replica 0 failed: OSError: [Errno 24] Too many open files"] * (MAX_FAILED_STARTS - 1)
    assert not any(record.exc_info for record in caplog.records)


async def test_launches_that_all_raise_are_given_up(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    keeper = start(FailingExecutor(MAX_FAILED_STARTS))
    await until(lambda: keeper.given_up)
    assert caplog.messages[-1] == "replica 0 failed to start 3 times: given up"
    assert keeper.failed_to_start
    assert not keeper.was_ready
    assert "Too many open files" in keeper.last_failure


async def test_an_error_of_ours_while_watching_ends_the_replica_and_another_is_launched(start: Start) -> None:
    def on_events(state: ReplicaState, events: list[Event]) -> None:
        if len(executor.launched) < 3:
            raise ZeroDivisionError

    executor = ScriptedExecutor()
    keeper = start(executor, on_events)
    await until(lambda: len(executor.launched) == 3 and keeper.replica_states)
    assert [replica.closed for replica in executor.launched] == [True, True, False]


@pytest.mark.parametrize("reason", [OSError(2, "No such file or directory"), StartImpossible("no weights")])
async def test_a_replica_once_ready_is_launched_until_it_is_again(start: Start, reason: Exception) -> None:
    executor = FailingExecutor(0, reason)
    keeper = start(executor)
    await until(lambda: keeper.was_ready)
    executor.num_failures = 4 * MAX_FAILED_STARTS
    executor.launched[0].die()
    await until(lambda: len(executor.launched) == 2 and keeper.replica_states[0].ready)
    assert executor.num_failures == 0
    assert not keeper.given_up


async def test_a_replica_that_ends_right_after_it_is_ready_is_launched_after_a_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []

    async def sleep(duration_s: float) -> None:
        pauses_s.append(duration_s)

    executor = ScriptedExecutor()
    keeper = start(executor, limits=replace(FAST, pause_s=USUAL_LIMITS.pause_s))
    sleep_really = asyncio.sleep
    for number in range(1, 8):
        await until(lambda n=number: len(executor.launched) == n and keeper.replica_states)  # type: ignore[misc]
        await until(lambda: keeper.replica_states[0].ready)
        monkeypatch.setattr("asr_server.dispatch.supervisor.asyncio.sleep", sleep)
        executor.launched[-1].die()
        while len(executor.launched) == number:
            await sleep_really(0)
        monkeypatch.undo()
    waited_s = [pause_s for pause_s in pauses_s if pause_s != FAST.tick_s]
    assert waited_s == [1.0, 3.0, 7.0, 15.0, 30.0, 30.0, 30.0]


# -- Ends --


def supervisor(executor: Executor) -> Supervisor:
    return Supervisor(executor, lambda *_: None, lambda state: None, lambda: None, FAST)


@pytest.mark.parametrize(("credit", "drain_s"), [(1, 2.0), (0, 0.0)])
async def test_at_a_stop_a_replica_may_leave_by_itself_once_it_is_ready(credit: int, drain_s: float) -> None:
    executor = ScriptedExecutor(credit)
    keeper = supervisor(executor)
    keeper.start()
    await until(lambda: keeper.replica_states and keeper.was_ready == bool(credit))
    await keeper.stop()
    assert (executor.launched[0].drained_s, executor.stopped) == (drain_s, True)


class WithoutWeights(ScriptedExecutor):
    async def launch(self, index: int) -> ScriptedReplica:
        raise StartImpossible("no weights")


async def test_waiting_for_the_first_replica_ends_by_credit_failure_or_a_stop(start: Start) -> None:
    executor = ScriptedExecutor(credit=0)
    keeper = start(executor)
    waiting = asyncio.create_task(keeper.until_ready())
    await until(lambda: keeper.replica_states)
    assert not waiting.done()
    executor.launched[0].say(Credit(1))
    await waiting
    assert keeper.was_ready
    stopped = supervisor(executor)
    stopped.expect_ends()
    await stopped.until_ready()
    failing = start(WithoutWeights())
    await failing.until_ready()
    assert failing.given_up


async def test_an_end_that_is_expected_is_no_error(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A signal to the group reaches a replica that is loading before the server's stop does."""
    caplog.set_level(logging.INFO, logger="asr_server.dispatch.supervisor")
    executor = ScriptedExecutor(credit=0)
    keeper = start(executor)
    await until(lambda: keeper.replica_states)
    keeper.expect_ends()
    for number in range(MAX_FAILED_STARTS):
        await until(lambda n=number: len(executor.launched) == n + 1 and keeper.replica_states)  # type: ignore[misc]
        executor.launched[-1].die()
    await until(lambda: keeper.given_up)
    assert not keeper.failed_to_start
    assert "replica 0" not in caplog.messages


async def test_a_start_that_is_impossible_later_on_is_an_error_in_the_log_each_time(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first replica was ready its reason is told where the server ends."""
    executor = ScriptedExecutor()
    keeper = start(executor)
    await until(lambda: keeper.was_ready)
    executor.launch = WithoutWeights().launch  # type: ignore[method-assign]
    executor.launched[0].die()
    await until(lambda: caplog.messages.count("no weights") >= 2)
    assert keeper.last_failure == "no weights"
    caplog.clear()
    failing = start(WithoutWeights())
    await until(lambda: failing.given_up)
    assert failing.last_failure == "no weights"
