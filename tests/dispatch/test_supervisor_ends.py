"""How replicas end: at a stop, by themselves, as expected; and who waits for the first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from asr_server.channel.messages import Credit
from asr_server.dispatch.supervisor import (
    MAX_FAILED_STARTS,
    Executor,
    ReplicaLimits,
    StartImpossible,
    Supervisor,
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
