"""Which chunk goes to which replica, and when.

Fairness between requests is self-clocked fair queueing (Golestani, INFOCOM 1994): each chunk is stamped, as
it comes, with the virtual time at which it would be finished if every request had an equal share, and the
smallest stamp goes first. A short request so passes a long one of the same age, and none starves, because
stamps never change. A chunk costs a padded encode plus what it is expected to decode, not its seconds alone.
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
    DecodingOptions,
    Event,
    Failed,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)
from asr_server.errors import ChunkFailed, EngineUnavailable
from asr_server.workers.executor import Executor, ReplicaGone, create_executor
from asr_server.workers.supervisor import Link, Supervisor

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
    ticket: Ticket
    stamp: float
    on_language: OnLanguage | None


@dataclass(eq=False)
class Ticket:
    """One request's place in the dispatcher."""

    request_id: str
    dispatcher: Dispatcher
    num_waiting: int = 0  # chunks that no replica has taken yet
    num_in_flight: int = 0
    parked: list[_Entry] = field(default_factory=list)  # waiting for this request's own chunks to finish
    last_stamp: float = 0.0
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def room(self) -> int:
        """How many more chunks this request may decode now; waits until there is one."""
        while (room := self.dispatcher.chunks_ahead - self.num_waiting) <= 0:
            self._room.clear()
            await self._room.wait()
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

    def leave_queue(self) -> None:
        self.num_waiting -= 1
        self._room.set()


class Dispatcher:
    """Owns the replicas' supervisor and the queue of chunks in front of them."""

    def __init__(self, settings: Settings, executor: Executor | None = None) -> None:
        self.chunks_ahead = settings.chunks_ahead
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
        self._clock = 0.0  # virtual: the stamp last served

    async def start(self) -> None:
        self._supervisor.start()

    async def stop(self) -> None:
        """What is still waiting fails; let requests finish before."""
        self._fail_all()
        await self._supervisor.stop()

    @property
    def ready(self) -> bool:
        return any(link.ready for link in self._supervisor.links)

    @property
    def given_up(self) -> bool:
        return self._supervisor.given_up

    @property
    def links(self) -> list[Link]:
        return self._supervisor.links

    @property
    def num_chunks(self) -> int:
        """Chunks waiting and in flight."""
        return len(self._entries)

    def open(self, request_id: str) -> Ticket:
        return Ticket(request_id, self)

    # -- Chunks in --

    async def enqueue(self, ticket: Ticket, submit: Submit, on_language: OnLanguage | None) -> ChunkResult:
        if self.given_up:
            raise EngineUnavailable("No engine is running.")
        ticket.last_stamp = max(self._clock, ticket.last_stamp) + _cost(submit)
        future: asyncio.Future[ChunkResult] = asyncio.get_running_loop().create_future()
        entry = _Entry(submit, future, ticket, ticket.last_stamp, on_language)
        self._wait(entry)
        self._dispatch()
        return await future

    def _wait(self, entry: _Entry) -> None:
        self._entries[entry.submit.id] = entry
        self._push(entry)
        entry.ticket.num_waiting += 1

    def _push(self, entry: _Entry) -> None:
        heapq.heappush(self._waiting, (entry.stamp, next(self._sequence), entry))

    def _dispatch(self) -> None:
        while (link := self._link_with_most_credit()) and (entry := self._next_entry()):
            self._clock = max(self._clock, entry.stamp)
            self._send(link, entry)

    def _link_with_most_credit(self) -> Link | None:
        links = [link for link in self._supervisor.links if link.credit > 0]
        return max(links, key=lambda link: link.credit, default=None)

    def _next_entry(self) -> _Entry | None:
        while self._waiting:
            entry = heapq.heappop(self._waiting)[2]
            ticket = entry.ticket
            if self._has_its_share(ticket) and not entry.future.done():
                ticket.parked.append(entry)
                continue
            ticket.leave_queue()
            if not entry.future.done():
                return entry
        return None

    def _has_its_share(self, ticket: Ticket) -> bool:
        num_slots = sum(link.num_slots for link in self._supervisor.links)
        return num_slots > 0 and ticket.num_in_flight >= max(1, num_slots // 2)

    def _land(self, ticket: Ticket) -> None:
        """One of the request's chunks is in flight no more: another may go."""
        ticket.num_in_flight -= 1
        for entry in ticket.parked:
            self._push(entry)
        ticket.parked.clear()

    def _send(self, link: Link, entry: _Entry) -> None:
        try:
            link.replica.send(entry.submit)
        except ReplicaGone:
            link.credit = 0  # its supervisor will say so too
            self._wait(entry)
            return
        link.credit -= 1
        link.in_flight.add(entry.submit.id)
        entry.ticket.num_in_flight += 1

    def cancel(self, ticket: Ticket) -> None:
        entries = [entry for entry in self._entries.values() if entry.ticket is ticket]
        for entry in entries:
            del self._entries[entry.submit.id]
            entry.future.cancel()
        ticket.parked.clear()
        ticket.num_in_flight = 0
        for link in self._supervisor.links:
            if _forget(link, ticket.request_id):
                self._tell(link, Cancel(ticket.request_id))

    def _tell(self, link: Link, command: Cancel | SetLanguage) -> None:
        try:
            link.replica.send(command)
        except ReplicaGone:
            link.credit = 0

    # -- Events back --

    def _on_event(self, link: Link, event: Event) -> None:
        match event:
            case LanguageDetected() if entry := self._entries.get(event.id):
                self._choose_language(link, entry, event)
            case Result() if entry := self._finish(link, event.id):
                _resolve(entry.future, event.result)
            case Failed() if entry := self._finish(link, event.id):
                _reject(entry.future, ChunkFailed(event.message))
        self._dispatch()

    def _finish(self, link: Link, id: ChunkId) -> _Entry | None:
        """None for an answer to an earlier attempt, or to a request that has left."""
        if id not in link.in_flight:
            return None
        link.in_flight.remove(id)
        entry = self._entries.pop(id, None)
        if entry is not None:
            self._land(entry.ticket)
        return entry

    def _choose_language(self, link: Link, entry: _Entry, event: LanguageDetected) -> None:
        probabilities = event.probabilities
        choose = entry.on_language or (lambda found: max(found, key=lambda code: found[code]))
        language = choose(probabilities)
        options = msgspec.structs.replace(entry.submit.options, language=language)
        entry.submit = msgspec.structs.replace(entry.submit, options=options)  # for a later attempt
        self._tell(link, SetLanguage(event.id, language))

    def _on_gone(self, link: Link) -> None:
        """Its chunks go elsewhere, ahead of the others: they keep their stamps."""
        link.credit = 0
        orphans = [entry for id in link.in_flight if (entry := self._entries.pop(id, None))]
        link.in_flight.clear()
        for entry in orphans:
            self._land(entry.ticket)
            self._retry(entry, link.replica.name)
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


def _forget(link: Link, request_id: str) -> bool:
    ids = {id for id in link.in_flight if id.request_id == request_id}
    link.in_flight -= ids
    return bool(ids)


def _resolve(future: asyncio.Future[ChunkResult], result: ChunkResult) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[ChunkResult], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
