"""What the dispatcher counts, says in the log, and does with replicas that are gone when it sends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from asr_server.channel.messages import (
    Cancel,
    Credit,
    EngineInfo,
    Heartbeat,
    LanguageDetected,
    SetLanguage,
    Submit,
)
from asr_server.core import ChunkId, DecodingOptions
from asr_server.dispatch.dispatcher import MAX_ATTEMPTS, MIN_ATTEMPTS, Dispatcher
from asr_server.dispatch.queue import PendingChunk, RequestHandle
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded
from tests.dispatch.scripted import OPTIONS, RunningDispatcher, ScriptedReplica, chunk, result, until
from tests.embedded import embedded


@pytest.fixture
async def app() -> AsyncIterator[RunningDispatcher]:
    app = await RunningDispatcher().open()
    yield app
    await app.dispatcher.stop()


async def test_chunks_and_slots_are_counted_over_all_replicas() -> None:
    app = await RunningDispatcher(credit=1, replicas=2).open()
    assert (app.dispatcher.num_slots, app.dispatcher.num_waiting, app.dispatcher.num_chunks) == (0, 0, 0)
    for replica in app.executor.launched:
        replica.say(Credit(0, num_slots=3))
    await until(lambda: app.dispatcher.num_slots == 6)
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    assert (app.dispatcher.num_waiting, handle.num_waiting, handle.num_in_flight) == (1, 1, 2)
    assert handle.num_moves == 5, "three have come and two were sent"
    handle.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (app.dispatcher.num_waiting, app.dispatcher.num_chunks, handle.num_in_flight) == (0, 0, 0)
    for state in app.dispatcher.supervisor.replica_states:
        assert (state.credit, state.in_flight) == (0, set())
    await app.dispatcher.stop()


async def test_requests_are_numbered_and_live_where_they_say_so(app: RunningDispatcher) -> None:
    first, second = app.dispatcher.open("a"), app.dispatcher.open("b", is_live=True)
    assert (first.number, first.is_live, second.number, second.is_live) == (0, False, 1, True)


async def test_with_a_single_slot_a_request_has_one_chunk_in_flight(app: RunningDispatcher) -> None:
    app.replica.say(Credit(7, num_slots=1))
    await until(lambda: app.dispatcher.num_slots == 1)
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    assert app.replica.submitted == [ChunkId("a", 0)]
    handle.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_steps_are_counted_from_when_a_chunk_was_sent(app: RunningDispatcher) -> None:
    app.replica.say(Heartbeat(5))
    (state,) = app.dispatcher.supervisor.replica_states
    await until(lambda: state.heartbeat.num_steps == 5)
    handle, other = app.dispatcher.open("a"), app.dispatcher.open("b")
    task = app.send(handle, 0)
    await until(lambda: app.replica.submitted)
    assert (handle.steps_in_flight(), other.steps_in_flight()) == (0, 0)
    app.replica.say(Heartbeat(9))
    await until(lambda: state.heartbeat.num_steps == 9)
    assert (handle.steps_in_flight(), other.steps_in_flight()) == (4, 0)
    app.replica.answer(ChunkId("a", 0))
    await task
    assert (handle.steps_in_flight(), handle.num_moves) == (0, 3)


async def test_the_log_has_the_engine_once_and_where_each_chunk_goes(
    app: RunningDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asr_server.dispatch.dispatcher")
    info = EngineInfo("cpu", "float32", 8, 2, dict.fromkeys(("device", "dtype", "num_slots"), "found"))
    assert app.dispatcher.engine is None
    for _ in range(2):
        app.replica.say(Credit(0, 8, info))
    task = app.send(app.dispatcher.open("a"), 3)
    await until(lambda: app.replica.submitted)
    app.replica.answer(ChunkId("a", 3))
    await task
    assert app.dispatcher.engine == info
    serving, sent = sorted(caplog.messages, reverse=True)
    assert serving.startswith("serving ")
    assert sent == "chunk 3 goes to replica 0"


async def test_a_chunk_for_a_replica_that_is_just_gone_waits_for_the_next(app: RunningDispatcher) -> None:
    gone = app.replica
    gone.closed = True  # and nobody was told yet
    handle = app.dispatcher.open("a")
    task = app.send(handle, 0)
    await until(lambda: handle.num_moves)
    (state,) = app.dispatcher.supervisor.replica_states
    assert (state.credit, state.in_flight, handle.num_waiting, handle.num_in_flight) == (0, set(), 1, 0)
    gone.say_gone()
    await until(lambda: app.replica is not gone and app.replica.submitted)
    assert app.replica.submitted == [ChunkId("a", 0)], "it was in no replica yet"
    app.replica.answer(ChunkId("a", 0))
    assert await task == result(0)


async def test_a_replica_that_is_gone_when_it_is_told_something_gets_no_more(app: RunningDispatcher) -> None:
    app.replica.say(Credit(3))
    (state,) = app.dispatcher.supervisor.replica_states
    await until(lambda: state.credit == 4)
    handle = app.dispatcher.open("a")
    task = app.send(handle, 0)
    await until(lambda: app.replica.submitted)
    app.replica.closed = True
    handle.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (state.credit, app.replica.cancelled) == (0, [])


async def test_the_likeliest_language_is_taken_where_nobody_chooses_and_kept_for_another_try(
    app: RunningDispatcher,
) -> None:
    first = app.replica
    handle = app.dispatcher.open("a")
    task = asyncio.create_task(handle.submit(chunk(0), DecodingOptions()))
    await until(lambda: first.submitted)
    moves = handle.num_moves
    first.say(LanguageDetected(ChunkId("a", 0), {"en": 0.4, "de": 0.5, "fr": 0.1}))
    await until(lambda: SetLanguage(ChunkId("a", 0), "de") in first.commands)
    assert handle.num_moves == moves + 1
    first.die()
    await until(lambda: app.replica is not first and app.replica.submitted)
    (again,) = (each for each in app.replica.commands if isinstance(each, Submit))
    assert again.options.language == "de"
    app.replica.answer(again.id)
    await task


async def test_a_chunk_that_ends_replicas_is_an_error_in_the_log_with_its_request(
    app: RunningDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    task = app.send(app.dispatcher.open("a"), 2)
    for attempt in range(MIN_ATTEMPTS):
        await until(lambda: ChunkId("a", 2, 0, attempt) in app.replica.submitted)
        app.replica.die()
    with pytest.raises(ReplicasEnded):
        await task
    lines = [each.getMessage() for each in caplog.records if each.name == "asr_server.dispatch.dispatcher"]
    assert lines == ["chunk 2 of request a has ended 5 replicas"]


@pytest.mark.parametrize(
    ("attempt", "num_ended", "is_given_up"),
    [
        (3, 4, False),
        (4, 5, True),  # all five ended with it
        (4, 6, False),
        (5, 7, True),
        (8, 100, False),
        (9, 100, True),
    ],
)
async def test_ends_without_a_chunk_allow_it_more_tries_up_to_ten(
    attempt: int, num_ended: int, is_given_up: bool
) -> None:
    assert (MIN_ATTEMPTS, MAX_ATTEMPTS) == (5, 10)
    dispatcher = Dispatcher(embedded(executor="inline"))
    dispatcher._num_ended = num_ended
    handle = RequestHandle("a", 0, dispatcher)
    tried = PendingChunk(Submit(ChunkId("a", 0, 0, attempt), chunk(0).samples, OPTIONS), handle, None, None)
    dispatcher._retry(tried)
    assert tried.future.done() == is_given_up
    if is_given_up:
        with pytest.raises(ChunkFailed, match=f"has ended {attempt + 1} engine processes"):
            await tried.future
    else:
        assert tried.submit.id.attempt == attempt + 1
        assert dispatcher.num_chunks == handle.num_waiting == 1


async def test_what_waits_at_a_stop_fails_with_the_reason_of_the_stop(app: RunningDispatcher) -> None:
    waiting = [app.send(app.dispatcher.open("a"), index) for index in range(2)]
    await until(lambda: app.dispatcher.num_chunks == 2)
    await app.dispatcher.stop()
    for task in waiting:
        with pytest.raises(EngineUnavailable, match="No engine is running"):
            await task
    assert (app.dispatcher.num_chunks, app.executor.stopped) == (0, True)


async def test_a_request_leaves_only_the_replicas_that_have_a_chunk_of_it() -> None:
    app = await RunningDispatcher(credit=1, replicas=2).open()
    leaves, stays = app.dispatcher.open("leaves"), app.dispatcher.open("stays")
    tasks = [app.send(handle, 0) for handle in (leaves, stays)]
    await until(lambda: app.dispatcher.num_chunks == 2 and not app.dispatcher.num_waiting)
    leaves.cancel()
    told = [each for replica in app.executor.launched for each in cancels(replica)]
    assert told == [Cancel("leaves")]
    for replica in app.executor.launched:
        for id in replica.submitted:
            replica.answer(id)
    assert await tasks[1] == result(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    await app.dispatcher.stop()


def cancels(replica: ScriptedReplica) -> list[Cancel]:
    return [command for command in replica.commands if isinstance(command, Cancel)]
