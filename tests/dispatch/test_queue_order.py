"""One key's chunks without a dispatcher: their order, who is passed over, and what comes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from asr_server import metrics
from asr_server.channel.messages import ChunkTimes, Submit
from asr_server.checkpoint.files import AudioWindow
from asr_server.core import Chunk, ChunkId, ChunkResult, DecodingOptions
from asr_server.dispatch.queue import FairQueue, Isolation, PendingChunk, RequestHandle
from asr_server.dispatch.supervisor import ReplicaState
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded, ShuttingDown
from tests.dispatch.scripted import ScriptedReplica, result

WINDOW = AudioWindow(1500)


class Taker:
    """Takes chunks, and keeps them."""

    chunks_ahead = 2

    def __init__(self) -> None:
        self.taken: list[PendingChunk] = []
        self.cancelled: list[RequestHandle] = []

    async def enqueue(self, chunk: PendingChunk) -> ChunkResult:
        self.taken.append(chunk)
        return await chunk.future

    def steps_in_flight(self, request: RequestHandle) -> int:
        return 7

    def cancel(self, request: RequestHandle) -> None:
        self.cancelled.append(request)


def request(name: str, number: int = 0, is_live: bool = False) -> RequestHandle:
    return RequestHandle(name, number, Taker(), is_live)


def pending(handle: RequestHandle, index: int = 0, duration_s: float = 30.0) -> PendingChunk:
    samples = np.zeros(int(duration_s * 16_000), np.float32)
    return PendingChunk(
        Submit(ChunkId(handle.request_id, index), samples, DecodingOptions()), handle, None, None
    )


def queued(queue: FairQueue, *chunks: PendingChunk) -> None:
    for chunk in chunks:
        queue.set_finish_tag(chunk)
        queue.push(chunk)


def served(queue: FairQueue, max_in_flight: float = 99) -> list[tuple[str, int]]:
    found = []
    while (chunk := queue.pop(max_in_flight)) is not None:
        found.append((chunk.submit.id.request_id, chunk.submit.id.chunk))
    return found


async def test_requests_take_turns_and_short_chunks_go_first() -> None:
    queue, long, short = FairQueue(WINDOW), request("long"), request("short")
    queued(queue, *(pending(long, index) for index in range(2)))
    queued(queue, *(pending(short, index, 3.0) for index in range(2)))
    assert served(queue) == [("short", 0), ("long", 0), ("short", 1), ("long", 1)]
    assert queue.pop(99) is None


async def test_who_comes_later_does_not_get_the_time_before() -> None:
    queue, first, second = FairQueue(WINDOW), request("first"), request("second")
    queued(queue, *(pending(first, index) for index in range(3)))
    for _ in range(2):
        queue.pop(99)
    late = pending(second)
    queued(queue, late, pending(second, 1))
    assert late.finish_tag == pytest.approx(4.0 + 2.0), "from where the queue stands"
    assert second.last_finish_tag == pytest.approx(8.0)
    assert served(queue) == [("first", 2), ("second", 0), ("second", 1)]


async def test_a_request_with_too_many_in_flight_is_passed_over_until_one_ends() -> None:
    queue, busy, other = FairQueue(WINDOW), request("busy"), request("other")
    queued(queue, *(pending(busy, index) for index in range(2)), pending(other))
    busy.num_in_flight = 2
    assert served(queue, max_in_flight=3) == [("busy", 0), ("other", 0), ("busy", 1)]
    queued(queue, *(pending(busy, index) for index in range(2)), pending(other))
    assert served(queue, max_in_flight=2) == [("other", 0)]
    queue.release(other)
    assert served(queue, max_in_flight=2) == []
    queue.release(busy)
    busy.num_in_flight = 1
    assert served(queue, max_in_flight=2) == [("busy", 0), ("busy", 1)]
    queue.release(busy)
    assert served(queue) == []


async def test_before_a_stop_live_speech_goes_first_and_then_the_oldest_whatever_is_in_flight() -> None:
    queue = FairQueue(WINDOW, in_order=True)
    old, new, live = request("old", 1), request("new", 2), request("live", 3, is_live=True)
    for handle in (new, live, old):
        handle.num_in_flight = 5
        queued(queue, *(pending(handle, index) for index in range(2)))
    names = [name for name, _ in served(queue, max_in_flight=1)]
    assert names == ["live", "live", "old", "old", "new", "new"]


async def test_chunks_of_one_request_leave_and_all_are_taken_with_those_passed_over() -> None:
    queue, busy, other = FairQueue(WINDOW), request("busy"), request("other")
    chunks = [*(pending(busy, index) for index in range(2)), *(pending(other, index) for index in range(2))]
    busy.num_in_flight = 1
    queued(queue, *chunks[:2])
    assert queue.pop(1) is None, "both are passed over"
    queued(queue, *chunks[2:])
    taken = queue.take_all()
    assert {id(chunk) for chunk in taken} == {id(chunk) for chunk in chunks}
    assert queue.take_all() == []
    queued(queue, *chunks)
    queue.remove(busy)
    assert served(queue) == [("other", 0), ("other", 1)]
    queued(queue, chunks[0])
    assert queue.pop(1) is None
    queue.remove(busy)
    queue.release(busy)
    assert served(queue) == []
    queued(queue, *chunks[:2])
    assert queue.pop(1) is None
    queued(queue, chunks[2])
    queue.clear()
    queue.release(busy)
    assert served(queue) == []


async def test_those_that_stay_keep_their_order_when_one_leaves() -> None:
    queue, handles = FairQueue(WINDOW), [request(str(number)) for number in range(12)]
    durations = [3.0, 9.0, 4.0, 20.0, 10.0, 5.0, 6.0, 30.0, 25.0, 15.0, 12.0, 7.0]  # a heap with deep places
    chunks = [pending(handle, 0, duration_s) for handle, duration_s in zip(handles, durations, strict=True)]
    for leaving in range(12):
        queued(queue, *chunks)
        queue.remove(handles[leaving])
        by_tag = sorted(chunks, key=lambda chunk: chunk.finish_tag)
        staying = [(each.request.request_id, 0) for each in by_tag if each.request is not handles[leaving]]
        assert served(queue) == staying


async def test_suspects_are_tried_by_attempts_where_a_replica_is_ready_idle_and_has_credit() -> None:
    isolation, handles = Isolation(), [request(str(number)) for number in range(9)]
    attempts = [0, 5, 1, 7, 6, 2, 3, 8, 4]
    suspects = [pending(handle) for handle in handles]
    for suspect, attempt in zip(suspects, attempts, strict=True):
        suspect.submit = replace(suspect.submit, id=replace(suspect.submit.id, attempt=attempt))
        isolation.add(suspect)
    busy, idle = (ReplicaState(ScriptedReplica(name, 0)) for name in ("busy", "idle"))
    assert isolation.next_trial([busy, idle]) is None, "none is ready"
    busy.ready = idle.ready = True
    busy.in_flight = {ChunkId("x", 0)}
    busy.credit = 4
    assert isolation.reserved([busy, idle]) is idle
    assert isolation.next_trial([busy, idle]) is None, "the one without work has no credit"
    assert isolation.next_trial([busy]) is None, "its work comes first"
    idle.credit = 1
    isolation.remove(handles[0])
    order = []
    while (trial := isolation.next_trial([busy, idle])) is not None:
        state, suspect = trial
        assert state is idle
        order.append(suspect.submit.id.attempt)
        state.in_flight = {suspect.submit.id}
        assert isolation.reserved([busy, idle]) is idle
        assert isolation.next_trial([busy, idle]) is None
        state.in_flight = set()
    assert order == [1, 2, 3, 4, 5, 6, 7, 8]
    assert isolation.reserved([busy, idle]) is None
    isolation.add(suspects[0])
    isolation.clear()
    assert isolation.next_trial([idle]) is None


async def test_a_request_waits_while_so_many_of_its_chunks_wait() -> None:
    handle = request("a")
    assert await handle.wait_for_capacity() == 2
    handle.num_waiting = 1
    assert await handle.wait_for_capacity() == 1
    handle.num_waiting = 3
    waiting = asyncio.create_task(handle.wait_for_capacity())
    for expected in (False, True):
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        handle.on_dequeued()
        assert handle.num_waiting == (1 if expected else 2)
    assert await waiting == 1
    assert handle.num_moves == 2


async def test_a_chunk_is_submitted_by_its_number_and_part() -> None:
    taker = Taker()
    handle = RequestHandle("a", 0, taker)
    chunk, options = Chunk(4, 0, np.zeros(16_000, np.float32)), DecodingOptions(language="de")

    def choose(found: dict[str, float]) -> str:
        return "de"

    early: list[ChunkResult] = []
    task = asyncio.create_task(handle.submit(chunk, options, 2, choose, early.append))
    await asyncio.sleep(0)
    (taken,) = taker.taken
    assert taken.submit == Submit(ChunkId("a", 4, 2), chunk.samples, options)
    assert (taken.request, taken.on_language, taken.on_early_result) == (handle, choose, early.append)
    taken.resolve(result(4), None)
    taken.resolve(result(5), ChunkTimes(0.1, 0.2))  # too late
    taken.fail(ChunkFailed("too late"))
    assert await task == result(4)
    assert handle.steps_in_flight() == 7
    handle.cancel()
    assert taker.cancelled == [handle]


def failed(reason: str) -> float:
    return metrics.REGISTRY.get_sample_value("asr_chunks_failed_total", {"reason": reason}) or 0.0


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
    chunk, before = pending(request("a")), failed(reason)
    chunk.fail(error)
    chunk.fail(error)
    with pytest.raises(type(error)):
        await chunk.future
    assert failed(reason) == before + 1


async def test_a_result_is_noted_in_the_figures_of_its_request() -> None:
    handle = request("a")
    noted: list[Any] = []
    handle.stats.on_result = lambda *arguments: noted.append(arguments)  # type: ignore[method-assign]
    handle.stats.on_chunk_times = lambda *arguments: noted.append(arguments)  # type: ignore[method-assign]
    chunk, times = pending(handle, 3), ChunkTimes(0.1, 0.2)
    chunk.resolve(result(3), times)
    assert noted == [(result(3), chunk.submit), (chunk.queued_at, times, 3)]
    silent = pending(handle, 4)
    silent.resolve(result(4), None)
    assert noted[2:] == [(result(4), silent.submit)]
    assert await chunk.future == result(3)
