"""A request's handle, and the order in which chunks are sent.

Keys take turns by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): next is the key that was
served least since it has had chunks waiting. Within a key, requests share by self-clocked fair queueing
(Golestani, INFOCOM 1994): a chunk's finish tag is the virtual time of its end if all requests had equal
shares, and the smallest goes first. Short requests pass long ones, and none starves.

`Isolation` finds the chunk that ends replicas.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from asr_server import metrics
from asr_server.core import AudioWindow, Chunk, ChunkId, ChunkResult, DecodingOptions
from asr_server.dispatch.supervisor import ReplicaState
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded, ShuttingDown
from asr_server.transport.messages import ChunkTimes, Submit

CHUNKS_AHEAD: Final = 4  # chunks of a request that are decoded and in no replica yet

OnLanguage = Callable[[dict[str, float]], str]
OnEarlyResult = Callable[[ChunkResult], None]


class ChunkTaker(Protocol):
    async def enqueue(self, chunk: PendingChunk) -> ChunkResult: ...

    def steps_in_flight(self, request: RequestHandle) -> int: ...

    def cancel(self, request: RequestHandle) -> None: ...


@dataclass(eq=False)
class RequestHandle:
    """Made by `Dispatcher.open`; its owner calls `wait_for_capacity`, `submit` and `cancel`."""

    handle_id: str  # the request's id, #, and a number: two requests may have the same id
    number: int  # requests are counted in the order in which they come
    dispatcher: ChunkTaker
    is_live: bool = False  # somebody speaks and waits: first before a stop
    is_background: bool = False  # nobody waits: it yields to all others
    num_waiting: int = 0  # chunks that no replica has taken yet
    num_in_flight: int = 0
    num_moves: int = 0  # chunks sent or taken, and events of them
    last_finish_tag: float = 0.0
    stats: metrics.RequestStats = field(default_factory=metrics.current_request_stats)
    _has_capacity: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_capacity(self) -> int:
        while (room := CHUNKS_AHEAD - self.num_waiting) <= 0:
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
        """Send one stretch of a chunk and wait for its result.

        `on_language` chooses from the probabilities if `options.language` is None. `on_early_result` gets
        the closed segments if `options.early_results` is set; another replica may report different ones.

        Raises ChunkFailed, EngineUnavailable when no replica is left, and what the callbacks raise.
        """
        submit = Submit(ChunkId(self.handle_id, chunk.index, part), chunk.samples, options)
        return await self.dispatcher.enqueue(PendingChunk(submit, self, on_language, on_early_result))

    def steps_in_flight(self) -> int:
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
    on_language: OnLanguage | None = None
    on_early_result: OnEarlyResult | None = None
    future: asyncio.Future[ChunkResult] = field(default_factory=asyncio.Future)
    cost: float = 0.0
    finish_tag: float = 0.0
    num_ended_before: int = 0  # replicas that had ended when it came
    sent_at_step: int = 0  # of the engine that it was sent to last
    is_withdrawn: bool = False  # from that engine: somebody waits for its slot
    queued_at: float = field(default_factory=time.monotonic)

    def choose_language(self, probabilities: dict[str, float]) -> str | None:
        """Return None if the choice fails, and with it the chunk."""
        try:
            if self.on_language is None:
                return max(probabilities, key=probabilities.__getitem__)
            return self.on_language(probabilities)
        except Exception as error:  # the request's own
            self.fail(error)
            return None

    def report_early(self, result: ChunkResult) -> None:
        if self.on_early_result is not None and not self.future.done():
            try:
                self.on_early_result(result)
            except Exception as error:  # the request's own
                self.fail(error)

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


BACKGROUND_COST: Final = 16.0  # times, of work that nobody waits for: others get nearly all beside it


@dataclass
class _KeyChunks:
    """The waiting chunks of one key's requests."""

    heap: list[tuple[tuple[bool, bool, float], int, PendingChunk]] = field(default_factory=list)
    virtual_time: float = 0.0  # the finish tag that was served last
    start_tag: float = 0.0  # of the key; grows by the cost of each chunk served

    def pop(self, max_in_flight: float) -> PendingChunk | None:
        """Return the first chunk of a request with fewer than `max_in_flight` chunks in replicas."""
        passed_over = []
        while self.heap and self.heap[0][-1].request.num_in_flight >= max_in_flight:
            passed_over.append(heapq.heappop(self.heap))
        chunk = heapq.heappop(self.heap)[-1] if self.heap else None
        for entry in passed_over:  # few: a request keeps `CHUNKS_AHEAD` of them here
            heapq.heappush(self.heap, entry)
        return chunk


class ChunkQueue:
    """Waiting chunks by key. Requests without a named key count as one key; those in the background apart."""

    def __init__(self, window: AudioWindow) -> None:
        self._window = window
        # Few: a file names them.
        self._keys: defaultdict[tuple[bool, str], _KeyChunks] = defaultdict(_KeyChunks)
        self._virtual_time = 0.0  # the key's start tag that was served last
        self._sequence = itertools.count()
        self._in_order = False

    def set_finish_tag(self, chunk: PendingChunk) -> None:
        window, num_samples, request = self._window, len(chunk.submit.samples), chunk.request
        # To encode a whole window and to decode one that is full of speech cost the same.
        chunk.cost = window.positions_for(num_samples) / window.num_positions
        chunk.cost += num_samples / window.num_samples
        chunk.cost *= BACKGROUND_COST if request.is_background else 1.0
        start = max(self._keys[_key_of(request)].virtual_time, request.last_finish_tag)
        chunk.finish_tag = request.last_finish_tag = start + chunk.cost

    def push(self, chunk: PendingChunk) -> None:
        request = chunk.request
        rank = (False, False, chunk.finish_tag)
        if self._in_order:
            rank = (request.is_background, not request.is_live, request.number)
        key = (False, "") if self._in_order else _key_of(request)
        heapq.heappush(self._keys[key].heap, (rank, next(self._sequence), chunk))

    def pop(self, max_in_flight: float, with_background: bool = True) -> PendingChunk | None:
        """Return the next chunk; pass over requests with `max_in_flight` chunks in replicas."""
        keys = [key for (is_background, _), key in self._keys.items() if with_background or not is_background]
        for key in sorted(keys, key=self._start_tag):
            if (chunk := key.pop(math.inf if self._in_order else max_in_flight)) is not None:
                key.virtual_time = max(key.virtual_time, chunk.finish_tag)
                self._virtual_time = self._start_tag(key)
                key.start_tag = self._virtual_time + chunk.cost
                return chunk
        return None

    def _start_tag(self, key: _KeyChunks) -> float:
        """Save nothing up for a key that had no chunks waiting."""
        return max(self._virtual_time, key.start_tag)

    def serve_in_order(self) -> None:
        """Give the oldest request all it can use; live speech goes first, the background last.

        Before a stop, some finished requests are better than many halves.
        """
        chunks = [chunk for key in self._keys.values() for *_, chunk in sorted(key.heap)]
        self._in_order = True
        self.clear()
        for chunk in chunks:
            self.push(chunk)

    def remove(self, request: RequestHandle) -> None:
        for key in self._keys.values():
            key.heap = [entry for entry in key.heap if entry[-1].request is not request]
            heapq.heapify(key.heap)

    def clear(self) -> None:
        for key in self._keys.values():
            key.heap.clear()


def _key_of(request: RequestHandle) -> tuple[bool, str]:
    return request.is_background, request.stats.key


class Isolation:
    """Try chunks that lost several replicas alone, on a reserved replica."""

    def __init__(self) -> None:
        self._suspects: list[PendingChunk] = []  # few: all were in flight when replicas ended
        self._reserved: ReplicaState | None = None  # has had a suspect

    def add(self, chunk: PendingChunk) -> None:
        self._suspects.append(chunk)

    def reserved(self, states: list[ReplicaState]) -> ReplicaState | None:
        """Return the replica that tries a suspect, or is to finish its other chunks before."""
        if self._reserved is not None and self._reserved.in_flight:
            return self._reserved
        if not self._suspects:
            return None
        ready = [state for state in states if state.ready]
        return min(ready, key=lambda state: len(state.in_flight), default=None)

    def next_trial(self, states: list[ReplicaState]) -> tuple[ReplicaState, PendingChunk] | None:
        state = self.reserved(states)
        if state is None or state.in_flight or state.credit < 1:
            return None
        self._reserved = state
        first = min(self._suspects, key=lambda chunk: (chunk.submit.id.attempt, chunk.finish_tag))
        self._suspects.remove(first)
        return state, first

    def remove(self, request: RequestHandle) -> None:
        self._suspects = [suspect for suspect in self._suspects if suspect.request is not request]

    def clear(self) -> None:
        self._suspects.clear()
