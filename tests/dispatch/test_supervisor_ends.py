"""How replicas end: at a stop, by themselves, as expected; and who waits for the first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from asr_server.channel.messages import Credit, Heartbeat
from asr_server.dispatch.supervisor import (
    MAX_FAILED_STARTS,
    Executor,
    ReplicaGone,
    ReplicaLimits,
    ReplicaState,
    StartImpossible,
    Supervisor,
    _early_ends,
)
from tests.dispatch.scripted import ScriptedExecutor, ScriptedReplica, until

FAST = ReplicaLimits(tick_s=0.01, pause_s=0.0)
Start = Callable[[Executor], Supervisor]


def supervisor(executor: Executor) -> Supervisor:
    return Supervisor(executor, lambda *_: None, lambda state: None, lambda: None, FAST)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Supervisor] = []

    def start(executor: Executor) -> Supervisor:
        started.append(supervisor(executor))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        await each.stop()


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


async def test_who_waits_for_the_first_replica_waits_for_its_credit_its_failure_or_a_stop(
    start: Start,
) -> None:
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


async def test_a_replica_that_has_ended_is_closed_at_once(start: Start) -> None:
    executor = ScriptedExecutor()
    start(executor)
    await until(lambda: executor.launched)
    executor.launched[0].die()
    await until(lambda: len(executor.launched) == 2)
    assert executor.launched[0].drained_s == 0.0


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


class Told:
    """What a supervisor tells its owner."""

    def __init__(self, executor: Executor) -> None:
        self.gone: list[ReplicaState] = []
        self.num_given_up = 0
        self.keeper = Supervisor(executor, lambda *_: None, self.gone.append, self._give_up, FAST)
        self.keeper.start()

    def _give_up(self) -> None:
        self.num_given_up += 1


class Nowhere(ScriptedExecutor):
    async def start(self) -> int:
        raise StartImpossible("no cluster")


async def test_an_executor_that_cannot_start_gives_all_up_with_its_reason() -> None:
    executor = Nowhere()
    told = Told(executor)
    await until(lambda: executor.stopped)
    assert (told.num_given_up, told.keeper.given_up, told.keeper.failed_to_start) == (1, True, True)
    assert told.keeper.last_failure == "no cluster"


async def test_all_are_given_up_once_the_last_one_is() -> None:
    executor = ScriptedExecutor(credit=0, replicas=2)
    told = Told(executor)
    await until(lambda: len(executor.launched) == 2)
    while not told.num_given_up:
        assert not told.keeper.given_up
        for running in [each for each in executor.launched if not each.closed][-1:]:
            running.die()
        await asyncio.sleep(0.001)
    assert told.keeper.given_up
    await told.keeper.stop()
    assert told.num_given_up == 1


async def test_its_owner_is_told_of_a_replica_that_is_gone_and_what_it_said_last() -> None:
    executor = ScriptedExecutor()
    told = Told(executor)
    await until(lambda: told.keeper.was_ready)
    (state,) = told.keeper.replica_states
    executor.launched[0].say(Heartbeat(7, slots_in_use=2))
    await until(lambda: state.heartbeat.num_steps)
    assert state.heartbeat == Heartbeat(7, slots_in_use=2)
    executor.launched[0].die()
    await until(lambda: told.gone)
    assert told.gone == [state]
    assert (told.num_given_up, state.ended_by, state.ended_with_chunks) == (0, "exited", False)
    await told.keeper.stop()


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


def test_why_a_replica_is_gone_is_its_message_alone() -> None:
    assert str(ReplicaGone("replica 0 has ended", "hung")) == "replica 0 has ended"
    assert ReplicaGone("replica 0").reason == "exited"


@pytest.mark.parametrize(("lived_s", "counted"), [(9.5, 3), (10.0, 0)])
def test_a_replica_lasts_if_it_lives_ten_seconds_after_it_was_ready(lived_s: float, counted: int) -> None:
    state = ReplicaState(ScriptedReplica("replica 0", 0))
    state.watched_s = 300.0
    state.on_ready()
    state.watched_s += lived_s
    assert _early_ends(2, state) == counted
