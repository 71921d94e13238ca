"""After the death of a replica: who is sent again with others, who is tried alone, and who is given up."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from asr_server.core import ChunkId, ChunkResult
from asr_server.dispatch.dispatcher import MIN_ATTEMPTS
from asr_server.errors import ReplicasEnded
from asr_server.transport.messages import Credit
from tests.unit.dispatch.scripted import RunningDispatcher, ScriptedReplica, result, until


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


async def die_twice(app: RunningDispatcher, num_chunks: int) -> ScriptedReplica:
    """Return the third replica: all that is in flight is suspect now."""
    replica = app.replica
    for _ in range(2):
        await until(lambda replica=replica: len(replica.submitted) == num_chunks)  # type: ignore[misc]
        replica.die()
        replica = await next_replica(app, replica)
    return replica


async def let_the_loop_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_after_one_death_chunks_go_out_again_beside_newcomers(app: RunningDispatcher) -> None:
    """A random kill must not make a full server decode one chunk after another."""
    tasks = send_each(app, "abc")
    first = app.replica
    await until(lambda: len(first.submitted) == 3)
    first.die()
    second = await next_replica(app, first)
    tasks |= send_each(app, "x")
    await until(lambda: len(second.submitted) == 4)
    assert {(id.handle_id, id.attempt) for id in second.submitted} == {
        ("a", 1),
        ("b", 1),
        ("c", 1),
        ("x", 0),
    }
    for id in second.submitted:
        second.answer(id)
    assert [await task for task in tasks.values()] == [result(0)] * 4


async def test_suspects_are_tried_one_at_a_time_before_anything_else(app: RunningDispatcher) -> None:
    tasks = send_each(app, "abc")
    third = await die_twice(app, 3)
    tasks |= send_each(app, "x")
    for index, name in enumerate("abc"):
        await until(lambda: len(third.submitted) > index)
        await let_the_loop_run()
        assert third.submitted[index:] == [ChunkId(name, 0, 0, attempt=2)]
        third.answer(third.submitted[index])
    await until(lambda: len(third.submitted) == 4)
    third.answer(ChunkId("x", 0))
    assert [await task for task in tasks.values()] == [result(0)] * 4


async def answer_all_but(poison: str, replica: ScriptedReplica) -> None:
    """Until the poisonous chunk is under way."""
    for index in range(10):
        await until(lambda: len(replica.submitted) > index)
        if replica.submitted[index].handle_id == poison:
            return
        replica.answer(replica.submitted[index])


async def test_a_chunk_that_kills_takes_no_neighbour_with_it_and_alone_twice_is_proof(
    app: RunningDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = send_each(app, "abpc")
    replica = await die_twice(app, 4)
    for _ in range(2):
        await answer_all_but("p", replica)
        replica.die()
        replica = await next_replica(app, replica)
    with pytest.raises(ReplicasEnded, match="has ended 4 engine processes"):
        await tasks["p"]
    assert [await tasks[name] for name in "abc"] == [result(0)] * 3
    assert len(app.executor.launched) == 5
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert "giving up chunk 0 of request p: 4 replicas died on it" in lines


async def test_a_chunk_is_not_blamed_where_as_many_replicas_end_without_it(app: RunningDispatcher) -> None:
    tasks = send_each(app, "ab")
    replica = await die_twice(app, 2)
    for _ in range(2 * MIN_ATTEMPTS):  # each of the two in turn
        await until(lambda replica=replica: len(replica.submitted) == 1)  # type: ignore[misc]
        replica.die()
        replica = await next_replica(app, replica)
    await answer_all_but("b", replica)
    replica.answer(replica.submitted[-1])
    assert [await task for task in tasks.values()] == [result(0)] * 2


async def test_a_suspect_that_killed_again_goes_behind_the_others(app: RunningDispatcher) -> None:
    tasks = send_each(app, "pab")
    replica = await die_twice(app, 3)
    await until(lambda: replica.submitted == [ChunkId("p", 0, 0, attempt=2)])
    replica.die()
    replica = await next_replica(app, replica)
    for index, name in enumerate("abp"):
        await until(lambda: len(replica.submitted) > index)
        assert replica.submitted[-1].handle_id == name
        replica.answer(replica.submitted[-1])
    await asyncio.gather(*tasks.values())


async def test_other_replicas_go_on_with_other_work() -> None:
    app = await RunningDispatcher(credit=1, replicas=2).open()
    tasks = send_each(app, "ab")
    left, right = app.executor.launched
    await until(lambda: len(left.submitted) == len(right.submitted) == 1)
    (poison,) = left.submitted
    for num_launched in (3, 4):
        left.die()
        await until(lambda num=num_launched: len(app.executor.launched) == num)  # type: ignore[misc]
        left = app.replica
        await until(lambda left=left: left.submitted)  # type: ignore[misc]
    assert left.submitted[0].attempt == 2
    left.say(Credit(1))
    right.answer(right.submitted[0])
    tasks |= send_each(app, "x")
    await until(lambda: len(right.submitted) == 2)
    await let_the_loop_run()
    assert len(left.submitted) == 1  # the suspect, and nothing beside it
    left.answer(left.submitted[0])
    right.answer(right.submitted[1])
    assert left.submitted[0].handle_id == poison.handle_id
    assert [await task for task in tasks.values()] == [result(0)] * 3
    await app.dispatcher.stop()


async def test_a_suspect_whose_client_leaves_makes_room_once_it_is_dropped(app: RunningDispatcher) -> None:
    """While it still runs, its crash would be blamed on the next suspect."""
    leaves = app.dispatcher.open("leaves")
    left, stays = app.send(leaves, 0), app.send(app.dispatcher.open("stays"), 0)
    replica = await die_twice(app, 2)
    await until(lambda: replica.submitted)
    replica.obeys = False  # it is busy with the chunk
    leaves.cancel()
    await let_the_loop_run()
    assert [id.handle_id for id in replica.submitted] == ["leaves"]
    replica.die()
    replica = await next_replica(app, replica)
    await until(lambda: replica.submitted)
    assert replica.submitted == [ChunkId("stays", 0, 0, attempt=2)], "it was not in the one that ended"
    last = app.dispatcher.open("last")
    waiting = app.send(last, 0)
    replica.answer(replica.submitted[-1])
    assert await stays == result(0)
    assert left.cancelled()
    await until(lambda: ChunkId("last", 0) in replica.submitted)
    replica.answer(ChunkId("last", 0))
    await waiting
