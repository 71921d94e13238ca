"""After the death of a replica: what it had in flight is tried alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from asr_server.core import ChunkId, ChunkResult
from asr_server.dispatch.dispatcher import MIN_ATTEMPTS
from asr_server.errors import ReplicasEnded
from tests.dispatch.scripted import RunningDispatcher, ScriptedReplica, result, until


@pytest.fixture
async def app() -> AsyncIterator[RunningDispatcher]:
    """One replica with room for four chunks."""
    app = await RunningDispatcher(credit=4).open()
    yield app
    await app.dispatcher.stop()


def send_each(app: RunningDispatcher, names: str) -> dict[str, asyncio.Task[ChunkResult]]:
    return {name: app.send(app.dispatcher.open(name), 0) for name in names}


async def next_replica(app: RunningDispatcher, before: ScriptedReplica) -> ScriptedReplica:
    await until(lambda: app.replica is not before)
    return app.replica


async def let_the_loop_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_suspects_are_tried_one_at_a_time_before_anything_else(app: RunningDispatcher) -> None:
    tasks = send_each(app, "abc")
    first = app.replica
    await until(lambda: len(first.submitted) == 3)
    first.die()
    second = await next_replica(app, first)
    tasks |= send_each(app, "x")
    for index, name in enumerate("abc"):
        await until(lambda: len(second.submitted) > index)
        await let_the_loop_run()
        assert second.submitted[index:] == [ChunkId(name, 0, 0, attempt=1)]
        second.answer(second.submitted[index])
    await until(lambda: len(second.submitted) == 4)
    second.answer(ChunkId("x", 0))
    assert [await task for task in tasks.values()] == [result(0)] * 4


async def answer_all_but(poison: str, app: RunningDispatcher, replica: ScriptedReplica) -> None:
    """Until the poisonous chunk is under way."""
    for index in range(10):
        await until(lambda: len(replica.submitted) > index)
        if replica.submitted[index].request_id == poison:
            return
        replica.answer(replica.submitted[index])


async def test_a_chunk_that_kills_takes_no_neighbour_with_it(app: RunningDispatcher) -> None:
    tasks = send_each(app, "abpc")
    replica = app.replica
    await until(lambda: len(replica.submitted) == 4)
    replica.die()
    for _ in range(MIN_ATTEMPTS - 1):
        replica = await next_replica(app, replica)
        await answer_all_but("p", app, replica)
        replica.die()
    with pytest.raises(ReplicasEnded, match=f"has ended {MIN_ATTEMPTS} engine processes"):
        await tasks["p"]
    assert [await tasks[name] for name in "abc"] == [result(0)] * 3
    assert len(app.executor.launched) <= 1 + MIN_ATTEMPTS


async def test_a_chunk_is_not_blamed_where_as_many_replicas_end_without_it(app: RunningDispatcher) -> None:
    tasks = send_each(app, "ab")
    replica = app.replica
    await until(lambda: len(replica.submitted) == 2)
    replica.die()
    for _ in range(2 * MIN_ATTEMPTS):  # each of the two in turn
        replica = await next_replica(app, replica)
        await until(lambda: len(replica.submitted) == 1)
        replica.die()
    replica = await next_replica(app, replica)
    await answer_all_but("b", app, replica)
    replica.answer(replica.submitted[-1])
    assert [await task for task in tasks.values()] == [result(0)] * 2


async def test_a_suspect_that_killed_again_goes_behind_the_others(app: RunningDispatcher) -> None:
    tasks = send_each(app, "pab")
    replica = app.replica
    await until(lambda: len(replica.submitted) == 3)
    replica.die()
    replica = await next_replica(app, replica)
    await until(lambda: replica.submitted == [ChunkId("p", 0, 0, attempt=1)])
    replica.die()
    replica = await next_replica(app, replica)
    for index, name in enumerate("abp"):
        await until(lambda: len(replica.submitted) > index)
        assert replica.submitted[-1].request_id == name
        replica.answer(replica.submitted[-1])
    await asyncio.gather(*tasks.values())


async def test_other_replicas_go_on_with_other_work() -> None:
    app = await RunningDispatcher(credit=2, replicas=2).open()
    tasks = send_each(app, "ab")
    left, right = app.executor.launched
    await until(lambda: len(left.submitted) == len(right.submitted) == 1)
    left.die()
    left = await next_replica(app, right)
    await until(lambda: left.submitted)
    tasks |= send_each(app, "x")
    await until(lambda: len(right.submitted) == 2)
    assert len(left.submitted) == 1  # the suspect, and nothing beside it
    for replica in (left, right):
        for id in replica.submitted:
            replica.answer(id)
    assert [await task for task in tasks.values()] == [result(0)] * 3
    await app.dispatcher.stop()


async def test_a_suspect_whose_client_leaves_makes_room_for_the_others(app: RunningDispatcher) -> None:
    leaves = app.dispatcher.open("leaves")
    left, stays = app.send(leaves, 0), app.send(app.dispatcher.open("stays"), 0)
    replica = app.replica
    await until(lambda: len(replica.submitted) == 2)
    replica.die()
    replica = await next_replica(app, replica)
    await until(lambda: replica.submitted)
    leaves.cancel()
    await until(lambda: ChunkId("stays", 0, 0, attempt=1) in replica.submitted)
    replica.answer(replica.submitted[-1])
    assert await stays == result(0)
    assert left.cancelled()
