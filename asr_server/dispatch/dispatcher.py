"""Decide which chunk goes to which replica, and when.

A replica grants credits, one a chunk; without credit, chunks wait here. `ChunkQueue` orders them. A request
has as many in flight as there are slots; the credit beyond is for the next request. Chunks of a lost replica
are sent again; those that were in two lost replicas are tried alone (`Isolation`).
"""

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from asr_server.checkpoint.files import revision_of
from asr_server.checkpoint.sizes import short_audio_mode
from asr_server.config import Settings, flag_name
from asr_server.core import AudioWindow, ChunkId, ChunkResult
from asr_server.dispatch.executors import create_local_executor
from asr_server.dispatch.queue import BACKGROUND_COST, ChunkQueue, Isolation, PendingChunk, RequestHandle
from asr_server.dispatch.supervisor import (
    USUAL_LIMITS,
    Executor,
    ReplicaGone,
    ReplicaLimits,
    ReplicaState,
    Supervisor,
)
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded
from asr_server.machine import available_cores
from asr_server.telemetry import working_for
from asr_server.transport.messages import (
    Cancel,
    Cancelled,
    Credit,
    EarlyResult,
    EngineInfo,
    Event,
    Failed,
    LanguageDetected,
    Result,
    SetLanguage,
)

# A chunk is given up when it has been in so many replicas that ended: twice beside others, then alone. Where
# replicas end without it too, it is less likely to be the reason: each such end allows one more.
ATTEMPTS_BESIDE_OTHERS: Final = 2
MIN_ATTEMPTS: Final = ATTEMPTS_BESIDE_OTHERS + 2
MAX_ATTEMPTS: Final = 10

logger = logging.getLogger(__name__)


CreateExecutor = Callable[[Settings], Executor]


class Dispatcher:
    def __init__(
        self,
        settings: Settings,
        create_executor: CreateExecutor = create_local_executor,
        window: AudioWindow | None = None,
        limits: ReplicaLimits = USUAL_LIMITS,
    ) -> None:
        self.engine: EngineInfo | None = None  # of the replica that became ready last; None before the first
        self._settings = settings
        self.draining = False
        self._create_executor, self._limits = create_executor, limits
        self.supervisor = self._new_supervisor()
        self._request_numbers = itertools.count()
        self._num_ended = 0  # replicas, of those that took work
        self._chunks: dict[ChunkId, PendingChunk] = {}  # waiting and in flight
        mode = short_audio_mode(settings.short_audio, settings.dtype)
        self._queue = ChunkQueue((window or AudioWindow()).for_short_audio(mode))
        self._isolation = Isolation()
        self._refusal: Callable[[], EngineUnavailable] | None = None  # for chunks that come now

    def _new_supervisor(self) -> Supervisor:
        return Supervisor(
            self._create_executor(self._settings),
            self._on_events,
            self._on_gone,
            lambda: self.fail_all(_no_engine),
            self._limits,
        )

    async def start(self) -> None:
        self._refusal = None
        self.supervisor.start()

    async def end_replicas(self) -> None:
        """Ends the replicas until the next `start`. Chunks that are here, or come meanwhile, wait for it."""
        await self.supervisor.stop()
        self.supervisor = self._new_supervisor()

    def serve_in_order(self) -> None:
        self._queue.serve_in_order()

    def drain(self) -> None:
        self.draining = True
        self.serve_in_order()

    async def stop(self) -> None:
        """Fail all chunks and end the replicas."""
        self.fail_all(self._refusal or _no_engine)
        await self.supervisor.stop()

    def fail_all(self, error: Callable[[], EngineUnavailable]) -> None:
        self._refusal = error
        for chunk in self._chunks.values():
            chunk.fail(error())
        self._chunks.clear()
        self._queue.clear()
        self._isolation.clear()

    @property
    def ready(self) -> bool:
        return any(state.ready for state in self.supervisor.replica_states)

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    @property
    def num_waiting(self) -> int:
        """Return the chunks that no replica has."""
        sent = itertools.chain.from_iterable(state.in_flight for state in self.supervisor.replica_states)
        return len(self._chunks.keys() - sent)

    @property
    def num_slots(self) -> int:
        return sum(state.num_slots for state in self.supervisor.replica_states)

    # -- Chunks in --

    def open(self, handle_id: str, is_live: bool = False) -> RequestHandle:
        return RequestHandle(handle_id, next(self._request_numbers), self, is_live)

    async def enqueue(self, chunk: PendingChunk) -> ChunkResult:
        if self._refusal:
            raise self._refusal()
        self._queue.set_finish_tag(chunk)
        chunk.num_ended_before = self._num_ended
        self._wait(chunk)
        self._dispatch()
        return await chunk.future

    def _wait(self, chunk: PendingChunk) -> None:
        self._chunks[chunk.submit.id] = chunk
        chunk.request.num_waiting += 1
        chunk.request.num_moves += 1
        is_suspect = chunk.submit.id.attempt >= ATTEMPTS_BESIDE_OTHERS
        (self._isolation.add if is_suspect else self._queue.push)(chunk)

    def _dispatch(self) -> None:
        states = self.supervisor.replica_states
        while trial := self._isolation.next_trial(states):
            self._send(*trial)
        reserved = self._isolation.reserved(states)
        max_in_flight = self.num_slots or math.inf  # for one request
        free = [state for state in states if state is not reserved]
        while (state := max(free, key=_room, default=None)) and state.credit > 0:
            chunk = self._queue.pop(max_in_flight, self._takes_background(state))
            if chunk is None:
                free.remove(state)  # another one may take what this one may not
            else:
                self._send(state, chunk)
        self._withdraw()

    def _takes_background(self, state: ReplicaState) -> bool:
        """Return whether one more that nobody waits for leaves nearly all of the replica to the others."""
        kinds = [chunk.request.is_background for id in state.in_flight if (chunk := self._chunks.get(id))]
        num_others = kinds.count(False)
        return not num_others or BACKGROUND_COST * kinds.count(True) < num_others

    def _withdraw(self) -> None:
        """Take back chunks that nobody waits for, the newest first, where others need their slots."""
        num_others = sum(not chunk.request.is_background for chunk in self._chunks.values())
        states = [state for state in self.supervisor.replica_states if state.in_flight]
        if num_others in (0, len(self._chunks)) or not states:
            return
        share = math.ceil(num_others / len(states))
        for state in states:
            chunks = [chunk for id in state.in_flight if (chunk := self._chunks.get(id))]
            kept = [chunk for chunk in chunks if chunk.request.is_background and not chunk.is_withdrawn]
            kept.sort(key=lambda chunk: chunk.sent_at_step)
            for chunk in kept[max(state.num_slots - share, state.num_slots // 8, 1) :]:
                chunk.is_withdrawn = True
                self._try_send(state, Cancel(chunk.request.handle_id, chunk.submit.id))

    def _send(self, state: ReplicaState, chunk: PendingChunk) -> None:
        chunk.request.on_dequeued()
        if chunk.future.done():
            return
        try:
            state.replica.send(chunk.submit)
        except ReplicaGone:
            state.credit = 0  # its supervisor will say so too
            self._wait(chunk)
            return
        chunk.sent_at_step, chunk.is_withdrawn = state.heartbeat.num_steps, False
        state.credit -= 1
        state.in_flight.add(chunk.submit.id)
        chunk.request.num_in_flight += 1
        with working_for(chunk.submit.id):
            logger.debug("chunk %d goes to %s", chunk.submit.id.chunk, state.replica.name)

    def cancel(self, request: RequestHandle) -> None:
        for chunk in [chunk for chunk in self._chunks.values() if chunk.request is request]:
            del self._chunks[chunk.submit.id]
            chunk.future.cancel()
        self._queue.remove(request)
        self._isolation.remove(request)
        request.num_in_flight = 0
        for state in self.supervisor.replica_states:
            if any(id.handle_id == request.handle_id for id in state.in_flight):
                self._try_send(state, Cancel(request.handle_id))
        self._dispatch()

    def _try_send(self, state: ReplicaState, command: Cancel | SetLanguage) -> None:
        try:
            state.replica.send(command)
        except ReplicaGone:
            state.credit = 0

    # -- Events back --

    def _on_events(self, state: ReplicaState, events: list[Event]) -> None:
        for event in events:
            match event:
                case Credit(engine=EngineInfo() as engine):
                    self._on_engine(engine)
                case LanguageDetected() if chunk := self._chunks.get(event.id):
                    chunk.request.num_moves += 1
                    self._choose_language(state, chunk, event)
                case EarlyResult() if event.id in state.in_flight and (chunk := self._chunks.get(event.id)):
                    chunk.request.num_moves += 1
                    chunk.report_early(event.result)
                case Cancelled(handle_id, None):
                    state.in_flight = {id for id in state.in_flight if id.handle_id != handle_id}
                case Cancelled(_, ChunkId() as id) if chunk := self._finish(state, id):
                    self._wait(chunk)  # it was withdrawn
                case Result() if chunk := self._finish(state, event.id):
                    chunk.resolve(event.result, event.times)
                case Failed() if chunk := self._finish(state, event.id):
                    chunk.fail(ChunkFailed(event.message))
        self._dispatch()

    def _on_engine(self, engine: EngineInfo) -> None:
        if self.engine is None:
            logger.info("%s", describe(self._settings, engine, self.supervisor.num_replicas))
        elif engine.device != self.engine.device:  # --device auto, and a GPU was lost meanwhile, or is back
            logger.warning("a replica runs on %s; the last one ran on %s", engine.device, self.engine.device)
        self.engine = engine

    def _finish(self, state: ReplicaState, id: ChunkId) -> PendingChunk | None:
        if id not in state.in_flight:
            return None
        state.in_flight.remove(id)
        chunk = self._chunks.pop(id, None)
        if chunk is not None:
            self._release(chunk.request)
        return chunk

    def steps_in_flight(self, request: RequestHandle) -> int:
        """Return the most steps that a replica took with one chunk of this request."""
        return max(
            (
                state.heartbeat.num_steps - chunk.sent_at_step
                for state in self.supervisor.replica_states
                for id in state.in_flight
                if id.handle_id == request.handle_id and (chunk := self._chunks.get(id))
            ),
            default=0,
        )

    def _release(self, request: RequestHandle) -> None:
        request.num_moves += 1
        request.num_in_flight -= 1

    def _choose_language(self, state: ReplicaState, chunk: PendingChunk, event: LanguageDetected) -> None:
        if language := chunk.choose_language(event.probabilities):
            options = msgspec.structs.replace(chunk.submit.options, language=language)
            chunk.submit = msgspec.structs.replace(chunk.submit, options=options)  # for a later attempt
            self._try_send(state, SetLanguage(event.id, language))

    def _on_gone(self, state: ReplicaState) -> None:
        state.credit = 0
        self._num_ended += state.ready
        suspects = [chunk for id in state.in_flight if (chunk := self._chunks.pop(id, None))]
        state.in_flight.clear()
        for chunk in suspects:
            self._release(chunk.request)
            self._retry(chunk)
        self._dispatch()

    def _retry(self, chunk: PendingChunk) -> None:
        id = chunk.submit.id
        num_attempts = id.attempt + 1
        num_ended_without_it = self._num_ended - chunk.num_ended_before - num_attempts
        if num_attempts >= min(MAX_ATTEMPTS, MIN_ATTEMPTS + num_ended_without_it):
            logger.error(
                "giving up chunk %d of request %s: %d replicas died on it",
                *(id.chunk, id.handle_id, num_attempts),
            )
            chunk.fail(ReplicasEnded(num_attempts))
            return
        chunk.request.stats.on_read_again("replica_lost")
        next_id = msgspec.structs.replace(id, attempt=num_attempts)
        chunk.submit = msgspec.structs.replace(chunk.submit, id=next_id)
        self._wait(chunk)


def _room(state: ReplicaState) -> tuple[bool, float, int]:
    """Rank replicas for the next chunk: credit comes back when a chunk is taken, long before it ends."""
    return state.credit > 0, -len(state.in_flight) / max(1, state.num_slots), state.credit


def describe(settings: Settings, engine: EngineInfo, num_replicas: int) -> str:
    revision = revision_of(Path(settings.model)) or f"of the files in {settings.model}"
    reasons = engine.reasons

    def chosen(value: object, setting: str, why: str) -> str:
        asked = getattr(settings, setting) not in ("auto", 0)
        return f"{value} ({flag_name(setting) if asked else why})"

    cores = f"{available_cores()} cores" + (f" for {num_replicas} replicas" if num_replicas > 1 else "")
    parts = [
        f"device {chosen(engine.device, 'device', reasons['device'])}",
        f"dtype {chosen(engine.dtype, 'dtype', reasons['dtype'])}",
        f"slots {chosen(engine.num_slots, 'max_slots', reasons['num_slots'])}",
        f"threads {chosen(engine.num_threads, 'cpu_threads', cores)}",
        f"replicas {num_replicas}" + (f" ({reasons['num_replicas']})" if "num_replicas" in reasons else ""),
    ]
    if kernels := reasons.get("kernels"):  # there was something to choose
        parts.append(f"kernels: {kernels}")
    return f"serving {settings.model_names[0]}, revision {revision}: {', '.join(parts)}"


def _no_engine() -> EngineUnavailable:
    return EngineUnavailable("No engine is running.")
