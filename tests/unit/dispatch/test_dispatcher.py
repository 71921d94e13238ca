import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asr_server import metrics
from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import CHUNKS_AHEAD, PendingChunk
from asr_server.dispatch.supervisor import MAX_FAILED_STARTS
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded, ShuttingDown
from asr_server.transport.messages import (
    ChunkTimes,
    Credit,
    EarlyResult,
    EngineInfo,
    Failed,
    LanguageDetected,
    SetLanguage,
    Submit,
)
from tests.support.embedded import embedded
from tests.unit.dispatch.scripted import OPTIONS, RunningDispatcher, chunk, result, until


@pytest.fixture
async def app() -> AsyncIterator[RunningDispatcher]:
    app = await RunningDispatcher().open()
    yield app
    await app.dispatcher.stop()


async def test_a_replica_on_another_device_than_the_last_one_is_told(
    app: RunningDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the device was left to it and a GPU is lost, it would else go on on the CPU without a word."""
    reasons = {"device": "found", "dtype": "found", "num_slots": "found"}
    for device in ("cuda", "cuda", "cpu"):
        app.replica.say(Credit(1, 8, EngineInfo(device, "float32", 8, 2, reasons)))
    with caplog.at_level(logging.WARNING):
        await until(lambda: app.dispatcher.engine is not None and app.dispatcher.engine.device == "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "a replica runs on cpu; the last one ran on cuda"
    ]


async def test_no_more_is_sent_than_credit_allows(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    assert app.replica.submitted == [ChunkId("a", 0)]
    app.replica.say(Credit(1))
    await until(lambda: len(app.replica.submitted) == 2)
    handle.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_may_not_decode_ahead_of_what_is_taken(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    assert await handle.wait_for_capacity() == CHUNKS_AHEAD
    tasks = [app.send(handle, index) for index in range(1 + CHUNKS_AHEAD)]
    await until(lambda: handle.num_waiting == CHUNKS_AHEAD)
    room = asyncio.create_task(handle.wait_for_capacity())
    await asyncio.sleep(0)
    assert not room.done()
    app.replica.say(Credit(1))
    assert await room == 1
    handle.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_cancelling_drops_what_waits_and_tells_the_replica_of_what_runs(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    handle.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in results)
    assert app.replica.cancelled == ["a"]
    assert app.dispatcher.num_chunks == 0


async def test_a_late_answer_to_a_cancelled_chunk_is_dropped(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    task = app.send(handle, 0)
    await until(lambda: app.replica.submitted)
    handle.cancel()
    app.replica.answer(ChunkId("a", 0))
    other = app.send(app.dispatcher.open("b"), 1)
    await until(lambda: ChunkId("b", 1) in app.replica.submitted)
    app.replica.answer(ChunkId("b", 1))
    assert await other == result(1)
    assert task.cancelled()


async def test_early_results_reach_the_request_while_its_chunk_is_in_flight(app: RunningDispatcher) -> None:
    told: list[ChunkResult] = []
    handle = app.dispatcher.open("a")
    task = asyncio.create_task(handle.submit(chunk(0), OPTIONS, on_early_result=told.append))
    silent = app.send(handle, 1)  # which waits, and asks for none
    await until(lambda: app.replica.submitted)
    moves = handle.num_moves
    for id in (ChunkId("a", 0), ChunkId("a", 1), ChunkId("b", 0)):
        app.replica.say(EarlyResult(id, result(7)))
    await until(lambda: told)
    app.replica.say(EarlyResult(ChunkId("a", 0), result(8)))
    await until(lambda: len(told) == 2)
    assert told == [result(7), result(8)]
    assert handle.num_moves == moves + 2
    app.replica.answer(ChunkId("a", 0))
    await task
    app.replica.say(EarlyResult(ChunkId("a", 0), result(9)))
    await until(lambda: ChunkId("a", 1) in app.replica.submitted)
    app.replica.say(EarlyResult(ChunkId("a", 1), result(9)))
    app.replica.answer(ChunkId("a", 1))
    await silent
    assert len(told) == 2


async def test_an_answer_of_an_earlier_attempt_is_dropped(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    first = app.replica
    await until(lambda: first.submitted)
    first.die()
    await until(lambda: app.replica is not first and app.replica.submitted)
    app.replica.answer(ChunkId("a", 0, 0, attempt=0), credit=0)
    app.replica.say(Failed(ChunkId("a", 0, 0, attempt=1), "the later word counts"))
    with pytest.raises(ChunkFailed, match="the later word counts"):
        await task


async def test_replicas_that_never_start_are_given_up_for_good() -> None:
    app = RunningDispatcher(credit=0)
    await app.dispatcher.start()
    task = app.send(app.dispatcher.open("a"), 0)
    for start in range(MAX_FAILED_STARTS):
        await until(lambda: len(app.executor.launched) == start + 1)
        app.replica.die()
    with pytest.raises(EngineUnavailable):
        await task
    assert app.dispatcher.supervisor.given_up
    assert not app.dispatcher.ready
    with pytest.raises(EngineUnavailable):
        await app.send(app.dispatcher.open("b"), 0)
    await app.dispatcher.stop()


async def test_work_is_spread_by_credit_over_replicas() -> None:
    app = await RunningDispatcher(credit=2, replicas=2).open()
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(4)]
    await until(lambda: all(len(replica.submitted) == 2 for replica in app.executor.launched))
    await app.dispatcher.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)


async def test_a_chunk_goes_to_the_replica_with_the_fewest_whatever_credit_has_come_back() -> None:
    app = await RunningDispatcher(credit=2, replicas=2).open()
    tasks = [app.send(app.dispatcher.open("a"), 0)]
    await until(lambda: any(replica.submitted for replica in app.executor.launched))
    idle, busy = sorted(app.executor.launched, key=lambda replica: len(replica.submitted))
    busy.say(Credit(2))  # it has taken the chunk, and works on it
    await until(lambda: max(state.credit for state in app.dispatcher.supervisor.replica_states) == 3)
    tasks.append(app.send(app.dispatcher.open("b"), 1))
    await until(lambda: idle.submitted)
    await app.dispatcher.stop()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_chunks_that_come_after_all_have_failed_fail_too(app: RunningDispatcher) -> None:
    waiting = [app.send(app.dispatcher.open("a"), index) for index in range(2)]
    await until(lambda: app.dispatcher.num_chunks == 2)
    app.dispatcher.fail_all(ShuttingDown)
    for task in (*waiting, app.send(app.dispatcher.open("b"), 0)):
        with pytest.raises(ShuttingDown):
            await task


async def test_while_replicas_are_ended_chunks_wait_for_the_next_start(app: RunningDispatcher) -> None:
    first = app.replica
    await app.dispatcher.end_replicas()
    assert (first.closed, app.executor.stopped, app.dispatcher.ready) == (True, True, False)
    task = app.send(app.dispatcher.open("a"), 0)
    await until(lambda: app.dispatcher.num_chunks == 1)
    await app.dispatcher.start()
    await until(lambda: app.replica is not first and app.replica.submitted)
    app.replica.answer(ChunkId("a", 0))
    assert await task == result(0)
    await app.dispatcher.stop()
    assert app.replica.closed


async def test_a_replica_that_is_lost_during_a_drain_is_replaced(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    first = app.replica
    await until(lambda: first.submitted)
    app.dispatcher.drain()
    first.die()
    await until(lambda: app.replica is not first and app.replica.submitted)
    app.replica.answer(app.replica.submitted[0])
    assert await task == result(0)


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


async def test_the_likeliest_language_is_taken_if_nobody_chooses_and_kept(app: RunningDispatcher) -> None:
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


@pytest.mark.parametrize("callback", ["on_language", "on_early_result"])
async def test_a_request_whose_callback_raises_fails_alone(app: RunningDispatcher, callback: str) -> None:
    """The replica that reported to it is healthy."""

    def fail(_: object) -> Any:
        raise ZeroDivisionError

    app.replica.say(Credit(1))
    handle, other = app.dispatcher.open("a"), app.send(app.dispatcher.open("b"), 0)
    asked: dict[str, Any] = {callback: fail}
    task = asyncio.create_task(handle.submit(chunk(0), DecodingOptions(), **asked))
    await until(lambda: len(app.replica.submitted) == 2)
    app.replica.say(LanguageDetected(ChunkId("a", 0), {"en": 0.4, "de": 0.6}))
    app.replica.say(EarlyResult(ChunkId("a", 0), result(7)))
    with pytest.raises(ZeroDivisionError):
        await task
    handle.cancel()
    assert app.replica.cancelled == ["a"]
    app.replica.answer(ChunkId("b", 0))
    assert await other == result(0)
    assert len(app.executor.launched) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ReplicasEnded(5), "replicas_ended"),
        (ShuttingDown(), "shutting_down"),
        (EngineUnavailable("no"), "no_engine"),
        (ChunkFailed("no"), "engine_error"),
        (ZeroDivisionError(), "request_error"),
    ],
)
async def test_failed_chunks_are_counted_once_by_their_reason(error: Exception, reason: str) -> None:
    def counted() -> float:
        return metrics.REGISTRY.get_sample_value("asr_chunks_failed_total", {"reason": reason}) or 0.0

    before = counted()
    pending = PendingChunk(
        Submit(ChunkId("a", 0), chunk(0).samples, OPTIONS), Dispatcher(embedded()).open("a")
    )
    for _ in range(2):
        pending.fail(error)
    pending.resolve(result(0), ChunkTimes(0.1, 0.2))  # too late
    with pytest.raises(type(error)):
        await pending.future
    assert counted() == before + 1
