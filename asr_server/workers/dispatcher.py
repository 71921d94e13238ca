"""Which chunk goes to which replica, and when.

Fairness between requests is self-clocked fair queueing (Golestani, INFOCOM 1994): each chunk gets, as it
comes, a finish tag: the virtual time at which it would be finished if every request had an equal share. The
smallest tag goes first. A short request so passes a long one of the same age, and none starves, because tags
never change. A chunk costs a padded encode plus what it is expected to decode, not its seconds alone.
No request holds more than half of all slots, so that a newcomer finds one free.

Replicas grant credits; a chunk without a credit waits here, where it can still be cancelled or sent
elsewhere. The samples of every chunk without a result are kept, so that a replica's death loses nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from asr_server.config import Settings
from asr_server.core import (
    WINDOW_SAMPLES,
    Cancel,
    Chunk,
    ChunkId,
    ChunkResult,
    Credit,
    DecodingOptions,
    EngineInfo,
    Event,
    Failed,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)
from asr_server.errors import ChunkFailed, EngineUnavailable
from asr_server.telemetry import working_for
from asr_server.workers.description import describe
from asr_server.workers.executor import Executor, ReplicaGone, create_executor
from asr_server.workers.supervisor import ReplicaState, Supervisor

ENCODE_COST = 1.0  # one padded window
DECODE_COST = 1.0  # the tokens of a full window of speech
MAX_ATTEMPTS = 3

OnLanguage = Callable[[dict[str, float]], str]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """One chunk on its way to a result."""

    submit: Submit
    future: asyncio.Future[ChunkResult]
    handle: RequestHandle
    finish_tag: float
    on_language: OnLanguage | None


@dataclass(eq=False)
class RequestHandle:
    """One request's place in the dispatcher."""

    request_id: str
    dispatcher: Dispatcher
    num_waiting: int = 0  # chunks that no replica has taken yet
    num_in_flight: int = 0
    throttled: list[_Entry] = field(default_factory=list)  # waiting for this request's own chunks to finish
    last_finish_tag: float = 0.0
    _has_capacity: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_capacity(self) -> int:
        """How many more chunks this request may decode now; waits until there is one."""
        while (room := self.dispatcher.chunks_ahead - self.num_waiting) <= 0:
            self._has_capacity.clear()
            await self._has_capacity.wait()
        return room

    async def submit(
        self, chunk: Chunk, options: DecodingOptions, part: int = 0, on_language: OnLanguage | None = None
    ) -> ChunkResult:
        """Sends one chunk and waits for what was heard.

        `on_language` gets the probabilities of the languages, when `options.language` is None and the model
        has several, and returns the one to go on with.

        Raises ChunkFailed, and EngineUnavailable when no replica is left.
        """
        submit = Submit(ChunkId(self.request_id, chunk.index, part), chunk.samples, options)
        return await self.dispatcher.enqueue(self, submit, on_language)

    def cancel(self) -> None:
        """Drops all that is waiting or running for this request. Harmless when nothing is."""
        self.dispatcher.cancel(self)

    def on_dequeued(self) -> None:
        self.num_waiting -= 1
        self._has_capacity.set()


class Dispatcher:
    """Owns the replicas' supervisor and the queue of chunks in front of them."""

    def __init__(self, settings: Settings, executor: Executor | None = None) -> None:
        self.chunks_ahead = settings.chunks_ahead
        self.engine: EngineInfo | None = None  # of the replica that became ready last; None before the first
        self._settings = settings
        self._supervisor = Supervisor(
            executor or create_executor(settings),
            settings.replicas,
            self._on_event,
            self._on_gone,
            self._fail_all,
        )
        self._waiting: list[tuple[float, int, _Entry]] = []  # a heap
        self._entries: dict[ChunkId, _Entry] = {}  # waiting and in flight
        self._sequence = itertools.count()
        self._virtual_time = 0.0  # virtual: the finish_tag last served

    async def start(self) -> None:
        self._supervisor.start()

    async def stop(self) -> None:
        """What is still waiting fails; let requests finish before."""
        self._fail_all()
        await self._supervisor.stop()

    @property
    def ready(self) -> bool:
        return any(state.ready for state in self._supervisor.replica_states)

    @property
    def given_up(self) -> bool:
        return self._supervisor.given_up

    @property
    def replica_states(self) -> list[ReplicaState]:
        return self._supervisor.replica_states

    @property
    def num_chunks(self) -> int:
        """Chunks waiting and in flight."""
        return len(self._entries)

    @property
    def num_slots(self) -> int:
        """Chunks decoded at once by all replicas."""
        return sum(state.num_slots for state in self._supervisor.replica_states)

    def open(self, request_id: str) -> RequestHandle:
        return RequestHandle(request_id, self)

    # -- Chunks in --

    async def enqueue(
        self, handle: RequestHandle, submit: Submit, on_language: OnLanguage | None
    ) -> ChunkResult:
        if self.given_up:
            raise EngineUnavailable("No engine is running.")
        handle.last_finish_tag = max(self._virtual_time, handle.last_finish_tag) + _cost(submit)
        future: asyncio.Future[ChunkResult] = asyncio.get_running_loop().create_future()
        entry = _Entry(submit, future, handle, handle.last_finish_tag, on_language)
        self._wait(entry)
        self._dispatch()
        return await future

    def _wait(self, entry: _Entry) -> None:
        self._entries[entry.submit.id] = entry
        self._push(entry)
        entry.handle.num_waiting += 1

    def _push(self, entry: _Entry) -> None:
        heapq.heappush(self._waiting, (entry.finish_tag, next(self._sequence), entry))

    def _dispatch(self) -> None:
        while (state := self._replica_with_most_credit()) and (entry := self._next_entry()):
            self._virtual_time = max(self._virtual_time, entry.finish_tag)
            self._send(state, entry)

    def _replica_with_most_credit(self) -> ReplicaState | None:
        replica_states = [state for state in self._supervisor.replica_states if state.credit > 0]
        return max(replica_states, key=lambda state: state.credit, default=None)

    def _next_entry(self) -> _Entry | None:
        while self._waiting:
            entry = heapq.heappop(self._waiting)[2]
            handle = entry.handle
            if self._has_full_share(handle) and not entry.future.done():
                handle.throttled.append(entry)
                continue
            handle.on_dequeued()
            if not entry.future.done():
                return entry
        return None

    def _has_full_share(self, handle: RequestHandle) -> bool:
        num_slots = self.num_slots
        return num_slots > 0 and handle.num_in_flight >= max(1, num_slots // 2)

    def _release(self, handle: RequestHandle) -> None:
        """One of the request's chunks is in flight no more: another may go."""
        handle.num_in_flight -= 1
        for entry in handle.throttled:
            self._push(entry)
        handle.throttled.clear()

    def _send(self, state: ReplicaState, entry: _Entry) -> None:
        try:
            state.replica.send(entry.submit)
        except ReplicaGone:
            state.credit = 0  # its supervisor will say so too
            self._wait(entry)
            return
        state.credit -= 1
        state.in_flight.add(entry.submit.id)
        with working_for(entry.submit.id):
            logger.debug("chunk %d goes to %s", entry.submit.id.chunk, state.replica.name)
        entry.handle.num_in_flight += 1

    def cancel(self, handle: RequestHandle) -> None:
        entries = [entry for entry in self._entries.values() if entry.handle is handle]
        for entry in entries:
            del self._entries[entry.submit.id]
            entry.future.cancel()
        self._drop_cancelled()
        handle.throttled.clear()
        handle.num_in_flight = 0
        for state in self._supervisor.replica_states:
            if _drop_in_flight(state, handle.request_id):
                self._try_send(state, Cancel(handle.request_id))

    def _drop_cancelled(self) -> None:
        """Frees the samples at once; otherwise they would stay until a replica has credit for them."""
        self._waiting = [item for item in self._waiting if not item[2].future.done()]
        heapq.heapify(self._waiting)

    def _try_send(self, state: ReplicaState, command: Cancel | SetLanguage) -> None:
        try:
            state.replica.send(command)
        except ReplicaGone:
            state.credit = 0

    # -- Events back --

    def _on_event(self, state: ReplicaState, event: Event) -> None:
        match event:
            case Credit(engine=EngineInfo() as engine):
                self._on_engine(engine)
            case LanguageDetected() if entry := self._entries.get(event.id):
                self._choose_language(state, entry, event)
            case Result() if entry := self._finish(state, event.id):
                _resolve(entry.future, event.result)
            case Failed() if entry := self._finish(state, event.id):
                _reject(entry.future, ChunkFailed(event.message))
        self._dispatch()

    def _on_engine(self, engine: EngineInfo) -> None:
        if self.engine is None:
            logger.info("%s", describe(self._settings, engine))
        self.engine = engine

    def _finish(self, state: ReplicaState, id: ChunkId) -> _Entry | None:
        """None for an answer to an earlier attempt, or to a request that has left."""
        if id not in state.in_flight:
            return None
        state.in_flight.remove(id)
        entry = self._entries.pop(id, None)
        if entry is not None:
            self._release(entry.handle)
        return entry

    def _choose_language(self, state: ReplicaState, entry: _Entry, event: LanguageDetected) -> None:
        probabilities = event.probabilities
        choose = entry.on_language or (lambda found: max(found, key=lambda code: found[code]))
        language = choose(probabilities)
        options = msgspec.structs.replace(entry.submit.options, language=language)
        entry.submit = msgspec.structs.replace(entry.submit, options=options)  # for a later attempt
        self._try_send(state, SetLanguage(event.id, language))

    def _on_gone(self, state: ReplicaState) -> None:
        """Its chunks go elsewhere, ahead of the others: they keep their finish tags."""
        state.credit = 0
        orphans = [entry for id in state.in_flight if (entry := self._entries.pop(id, None))]
        state.in_flight.clear()
        for entry in orphans:
            self._release(entry.handle)
            self._retry(entry, state.replica.name)
        self._dispatch()

    def _retry(self, entry: _Entry, name: str) -> None:
        id = entry.submit.id
        if id.attempt + 1 >= MAX_ATTEMPTS:
            _reject(
                entry.future, ChunkFailed(f"{name} died while it decoded this chunk, as did others before.")
            )
            return
        next_id = msgspec.structs.replace(id, attempt=id.attempt + 1)
        entry.submit = msgspec.structs.replace(entry.submit, id=next_id)
        self._wait(entry)

    def _fail_all(self) -> None:
        for entry in self._entries.values():
            _reject(entry.future, EngineUnavailable("No engine is running."))
        self._entries.clear()
        self._waiting.clear()


def _cost(submit: Submit) -> float:
    return ENCODE_COST + DECODE_COST * len(submit.samples) / WINDOW_SAMPLES


def _drop_in_flight(state: ReplicaState, request_id: str) -> bool:
    ids = {id for id in state.in_flight if id.request_id == request_id}
    state.in_flight -= ids
    return bool(ids)


def _resolve(future: asyncio.Future[ChunkResult], result: ChunkResult) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[ChunkResult], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
