"""Run a request's tasks together, and end it where nothing moves, so that no client waits without end.

Other waits are bounded elsewhere. What remains are faults of the server, such as a lost thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from asr_server import metrics
from asr_server.audio.recording import PreprocessPool
from asr_server.dispatch.queue import RequestHandle
from asr_server.errors import RequestStalled


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


# Of the engine, while a chunk is with its replica. Six tries of 448 tokens are 2,688 steps in a slot, and as
# many may pass before there is a free one.
MAX_STEPS_IN_FLIGHT = 20_000
TICK_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StallLimits:
    """Limits of the time in which nothing moves."""

    request_s: float = 60.0
    pool_s: float = 660.0  # the work that one file may be (`AudioLimits`), and a minute


class StallWatch:
    """Watch one request by ticks of the event loop, so that a paused process is not a stall."""

    def __init__(self, handle: RequestHandle, pool: PreprocessPool, limits: StallLimits) -> None:
        self._handle, self._pool, self._limits = handle, pool, limits
        self._num_in_pool = 0
        self._seen: tuple[int, ...] = ()  # what had moved at the last tick
        self._still_s = 0.0  # since something moved

    @contextmanager
    def waiting_for_pool(self) -> Iterator[None]:
        self._num_in_pool += 1
        try:
            yield
        finally:
            self._num_in_pool -= 1

    async def run(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Watch until cancelled or all `tasks` are done. Raises RequestStalled."""
        tick_s = min(TICK_S, self._limits.request_s / 4)
        while True:
            await asyncio.sleep(tick_s)
            if not all(task.done() for task in tasks) and (reason := self._stall(tick_s)):
                metrics.requests_stalled.inc()
                logger.error("the request is ended: %s", reason)
                raise RequestStalled(f"The request came to a standstill and was ended: {reason}.")

    def _stall(self, tick_s: float) -> str:
        """Return why the request stands still, or nothing."""
        handle, num_finished = self._handle, self._pool.stats.finished if self._num_in_pool else 0
        seen = (handle.num_moves, num_finished, self._num_in_pool)
        if seen != self._seen or handle.num_waiting:
            self._seen, self._still_s = seen, 0.0
            return ""
        self._still_s += tick_s
        if handle.num_in_flight:
            num_steps = handle.steps_in_flight()
            is_over = num_steps > MAX_STEPS_IN_FLIGHT
            return f"a replica has taken {num_steps} steps without finishing its chunk" if is_over else ""
        if self._num_in_pool:
            is_over = self._still_s >= self._limits.pool_s
            return (
                f"the threads that decode have finished nothing for {self._still_s:.0f} s" if is_over else ""
            )
        is_over = self._still_s >= self._limits.request_s
        return f"nothing of it has moved for {self._still_s:.0f} s" if is_over else ""
