"""One request's place in the dispatcher, and one chunk of it on its way to a result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asr_server import metrics
from asr_server.core import Chunk, ChunkId, ChunkResult, ChunkTimes, DecodingOptions, Submit
from asr_server.errors import ChunkFailed, EngineUnavailable, ReplicasEnded, ShuttingDown

if TYPE_CHECKING:
    from asr_server.workers.dispatcher import Dispatcher

OnLanguage = Callable[[dict[str, float]], str]
OnEarlyResult = Callable[[ChunkResult], None]


@dataclass(eq=False)
class RequestHandle:
    """Made by `Dispatcher.open`. What its owner calls are `wait_for_capacity`, `submit` and `cancel`."""

    request_id: str
    number: int  # requests are counted in the order in which they come
    dispatcher: Dispatcher
    num_waiting: int = 0  # chunks that no replica has taken yet
    num_in_flight: int = 0
    num_moves: int = 0  # chunks sent or taken, and events of them
    last_finish_tag: float = 0.0
    stats: metrics.RequestStats = field(default_factory=metrics.current_request_stats)
    _has_capacity: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_capacity(self) -> int:
        """How many more chunks this request may decode now; waits until there is one."""
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
        """Sends one chunk and waits for what was heard.

        `on_language` gets the probabilities of the languages, when `options.language` is None and the model
        has several, and returns the one to go on with. `on_early_result` gets the segments closed so far,
        where `options.early_results` asks for them; begun again on another replica, perhaps others.

        Raises ChunkFailed, and EngineUnavailable when no replica is left.
        """
        submit = Submit(ChunkId(self.request_id, chunk.index, part), chunk.samples, options)
        return await self.dispatcher.enqueue(self, submit, on_language, on_early_result)

    def steps_in_flight(self) -> int:
        """The most steps that a replica has taken while it had one and the same chunk of this request."""
        return self.dispatcher.steps_in_flight(self)

    def cancel(self) -> None:
        """Drops all that is waiting or running for this request. Harmless when nothing is."""
        self.dispatcher.cancel(self)

    def on_dequeued(self) -> None:
        self.num_waiting -= 1
        self.num_moves += 1
        self._has_capacity.set()


@dataclass(eq=False)
class PendingChunk:
    """Its samples are kept until there is a result, so that the death of a replica loses nothing."""

    submit: Submit
    request: RequestHandle
    on_language: OnLanguage | None
    finish_tag: float
    future: asyncio.Future[ChunkResult]
    num_ended_before: int  # replicas that had ended when it came
    on_early_result: OnEarlyResult | None = None
    sent_at_step: int = 0  # of the engine that it was sent to last
    queued_at: float = field(default_factory=time.monotonic)

    def resolve(self, result: ChunkResult, times: ChunkTimes | None) -> None:
        if not self.future.done():
            self.future.set_result(result)
            self.request.stats.on_result(result, self.submit)
            if times is not None:
                metrics.observe_chunk_times(time.monotonic() - self.queued_at, times)

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
