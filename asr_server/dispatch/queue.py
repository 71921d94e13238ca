"""A request's place in the dispatcher, its chunks, and the order that those of one key are sent in.

Between requests it is self-clocked fair queueing (Golestani, INFOCOM 1994): each chunk's finish tag is the
virtual time of its end if all requests had equal shares; the smallest goes first. Short requests pass long
ones, and none starves. A chunk costs a padded encode and its expected tokens.

`Isolation` finds the chunk that ends replicas. All chunks of a lost replica are suspects, decoded one at
a time on a reserved replica that has finished its work.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from asr_server import metrics
from asr_server.channel.messages import ChunkTimes, Submit
from asr_server.checkpoint.files import AudioWindow
from asr_server.core import Chunk, ChunkId, ChunkResult, DecodingOptions
from asr_server.dispatch.supervisor import ReplicaState
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded, ShuttingDown

OnLanguage = Callable[[dict[str, float]], str]
OnEarlyResult = Callable[[ChunkResult], None]


class ChunkTaker(Protocol):
    chunks_ahead: int

    async def enqueue(self, chunk: PendingChunk) -> ChunkResult: ...

    def steps_in_flight(self, request: RequestHandle) -> int: ...

    def cancel(self, request: RequestHandle) -> None: ...


@dataclass(eq=False)
class RequestHandle:
    """Made by `Dispatcher.open`; its owner calls `wait_for_capacity`, `submit` and `cancel`."""

    request_id: str
    number: int  # requests are counted in the order in which they come
    dispatcher: ChunkTaker
    is_live: bool = False  # somebody speaks and waits: first before a stop
    num_waiting: int = 0  # chunks that no replica has taken yet
    num_in_flight: int = 0
    num_moves: int = 0  # chunks sent or taken, and events of them
    last_finish_tag: float = 0.0
    stats: metrics.RequestStats = field(default_factory=metrics.current_request_stats)
    _has_capacity: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> str:
        return self.stats.key

    async def wait_for_capacity(self) -> int:
        while (room := self.dispatcher.chunks_ahead - self.num_waiting) <= 0:
            self._has_capacity.clear()
            await self._has_capacity.wait()
        return room

    async def submit(
        self,
        chunk: Chunk,
        options: DecodingOptions,
        part: int = 0,
        on_language: OnLanguage | None = None,
        on_early_result: OnEarlyResult | None = None,
    ) -> ChunkResult:
        """Send one chunk and wait for its result.

        `on_language` chooses from the probabilities if `options.language` is None. `on_early_result` gets
        the closed segments if `options.early_results` is set; another replica may report different ones.

        Raises ChunkFailed, and EngineUnavailable when no replica is left.
        """
        submit = Submit(ChunkId(self.request_id, chunk.index, part), chunk.samples, options)
        return await self.dispatcher.enqueue(PendingChunk(submit, self, on_language, on_early_result))

    def steps_in_flight(self) -> int:
        """Return the most steps that a replica took with one chunk of this request."""
        return self.dispatcher.steps_in_flight(self)

    def cancel(self) -> None:
        self.dispatcher.cancel(self)

    def on_dequeued(self) -> None:
        self.num_waiting -= 1
        self.num_moves += 1
        self._has_capacity.set()


@dataclass(eq=False)
class PendingChunk:
    submit: Submit
    request: RequestHandle
    on_language: OnLanguage | None
    on_early_result: OnEarlyResult | None
    future: asyncio.Future[ChunkResult] = field(default_factory=asyncio.Future)
    cost: float = 0.0
    finish_tag: float = 0.0
    num_ended_before: int = 0  # replicas that had ended when it came
    sent_at_step: int = 0  # of the engine that it was sent to last
    queued_at: float = field(default_factory=time.monotonic)

    def resolve(self, result: ChunkResult, times: ChunkTimes | None) -> None:
        if not self.future.done():
            self.future.set_result(result)
            self.request.stats.on_result(result, self.submit)
            if times is not None:
                self.request.stats.on_chunk_times(self.queued_at, times, self.submit.id.chunk)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            metrics.chunks_failed.labels(_reason(error)).inc()


def _reason(error: Exception) -> str:
    match error:
        case ReplicasEnded():
            return "replicas_ended"
        case ShuttingDown():
            return "shutting_down"
        case EngineUnavailable():
            return "no_engine"
        case ChunkFailed():
            return "engine_error"
    return "request_error"


ENCODE_COST = 1.0  # of a whole window, which most chunks are padded to
DECODE_COST = 1.0  # the tokens of a full window of speech


class FairQueue:
    """The chunks of one key's requests."""

    def __init__(self, window: AudioWindow, in_order: bool = False) -> None:
        self._window = window
        self._heap: list[tuple[tuple[bool, float], int, PendingChunk]] = []
        self._throttled: defaultdict[RequestHandle, list[PendingChunk]] = defaultdict(list)
        self._sequence = itertools.count()
        self._virtual_time = 0.0  # the finish tag that was served last
        self._in_order = in_order  # before a stop: the oldest request first, live speech before files

    def set_finish_tag(self, chunk: PendingChunk) -> None:
        window, num_samples, request = self._window, len(chunk.submit.samples), chunk.request
        chunk.cost = ENCODE_COST * window.positions_for(num_samples) / window.num_positions
        chunk.cost += DECODE_COST * num_samples / window.num_samples
        start = max(self._virtual_time, request.last_finish_tag)
        chunk.finish_tag = request.last_finish_tag = start + chunk.cost

    def push(self, chunk: PendingChunk) -> None:
        heapq.heappush(self._heap, (self._rank(chunk), next(self._sequence), chunk))

    def _rank(self, chunk: PendingChunk) -> tuple[bool, float]:
        if not self._in_order:
            return False, chunk.finish_tag
        return not chunk.request.is_live, chunk.request.number

    def pop(self, max_in_flight: float) -> PendingChunk | None:
        """Return the next chunk; pass over requests with `max_in_flight` chunks until `release`."""
        while self._heap:
            chunk = heapq.heappop(self._heap)[2]
            if chunk.request.num_in_flight >= max_in_flight and not self._in_order:
                self._throttled[chunk.request].append(chunk)
                continue
            self._virtual_time = max(self._virtual_time, chunk.finish_tag)
            return chunk
        return None

    def release(self, request: RequestHandle) -> None:
        for chunk in self._throttled.pop(request, ()):
            self.push(chunk)

    def take_all(self) -> list[PendingChunk]:
        chunks = [chunk for _, _, chunk in sorted(self._heap)]
        chunks += itertools.chain(*self._throttled.values())
        self.clear()
        return chunks

    def remove(self, request: RequestHandle) -> None:
        self._throttled.pop(request, None)
        self._heap = [item for item in self._heap if item[2].request is not request]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()
        self._throttled.clear()


class _Trial(NamedTuple):
    state: ReplicaState
    id: ChunkId

    @property
    def is_running(self) -> bool:
        return self.id in self.state.in_flight


class Isolation:
    def __init__(self) -> None:
        self._suspects: list[tuple[int, float, int, PendingChunk]] = []  # a heap
        self._sequence = itertools.count()
        self._trial: _Trial | None = None

    def add(self, chunk: PendingChunk) -> None:
        order = (chunk.submit.id.attempt, chunk.finish_tag, next(self._sequence))
        heapq.heappush(self._suspects, (*order, chunk))

    def reserved(self, states: list[ReplicaState]) -> ReplicaState | None:
        if self._trial and self._trial.is_running:
            return self._trial.state
        if not self._suspects:
            return None
        ready = [state for state in states if state.ready]
        return min(ready, key=lambda state: len(state.in_flight), default=None)

    def next_trial(self, states: list[ReplicaState]) -> tuple[ReplicaState, PendingChunk] | None:
        state = self.reserved(states)
        if state is None or state.in_flight or state.credit < 1:
            return None
        chunk = heapq.heappop(self._suspects)[-1]
        self._trial = _Trial(state, chunk.submit.id)
        return state, chunk

    def remove(self, request: RequestHandle) -> None:
        self._suspects = [suspect for suspect in self._suspects if suspect[-1].request is not request]
        heapq.heapify(self._suspects)

    def clear(self) -> None:
        self._suspects.clear()
