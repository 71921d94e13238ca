"""Keeps every replica alive: starts it, watches two signals of life, replaces it when it dies or hangs.

A replica is frozen when its heartbeats stop, and hung when they go on while its engine, with work to do,
takes no step. A large batch on a small machine is neither: the limit grows with the longest step seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asr_server.core import ChunkId, Credit, Event, Heartbeat
from asr_server.workers.executor import Executor, Replica, ReplicaGone

STARTUP_LIMIT_S = 900.0
FROZEN_AFTER_S = 5.0
HUNG_AFTER_S = 30.0
HUNG_AFTER_STEPS = 10.0  # times the longest step so far
MAX_FAILED_STARTS = 3
MAX_PAUSE_S = 30.0
DRAIN_S = 5.0  # for a replica to leave by itself at shutdown

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ReplicaState:
    """What this side knows of one live replica."""

    replica: Replica
    ready: bool = False
    credit: int = 0
    num_slots: int = 0
    in_flight: set[ChunkId] = field(default_factory=set)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(num_steps=0))
    progress_at: float = field(default_factory=time.monotonic)
    longest_step_s: float = 0.0

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Takes note of progress. Raises ReplicaGone for one that hangs."""
        if heartbeat.num_steps > self.heartbeat.num_steps or not self.in_flight:
            if self.in_flight:
                self.longest_step_s = max(self.longest_step_s, now - self.progress_at)
            self.progress_at = now
        self.heartbeat = heartbeat
        stalled_s = now - self.progress_at
        if self.ready and stalled_s > max(HUNG_AFTER_S, HUNG_AFTER_STEPS * self.longest_step_s):
            raise ReplicaGone(f"{self.replica.name} has taken no step for {stalled_s:.0f} s: hung")


class Supervisor:
    """Owns the tasks that keep `num_replicas` replicas running."""

    def __init__(
        self,
        executor: Executor,
        num_replicas: int,
        on_event: Callable[[ReplicaState, Event], None],
        on_gone: Callable[[ReplicaState], None],
        on_given_up: Callable[[], None],
    ) -> None:
        self.replica_states: list[ReplicaState] = []
        self._executor = executor
        self._num_replicas = num_replicas
        self._on_event = on_event
        self._on_gone = on_gone
        self._on_given_up = on_given_up
        self._num_given_up = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def given_up(self) -> bool:
        """No replica is left, and none will be tried again."""
        return self._num_given_up == self._num_replicas

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._supervise(index), name=f"supervise replica {index}")
            for index in range(self._num_replicas)
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _supervise(self, index: int) -> None:
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            state = ReplicaState(await self._executor.launch(index))
            await self._watch(state)
            failed_starts = 0 if state.ready else failed_starts + 1
            await asyncio.sleep(min(MAX_PAUSE_S, 2.0**failed_starts - 1.0))
        logger.error("replica %d failed to start %d times: given up", index, failed_starts)
        self._num_given_up += 1
        if self.given_up:
            self._on_given_up()

    async def _watch(self, state: ReplicaState) -> None:
        """From launch to the end of one replica."""
        self.replica_states.append(state)
        try:
            while True:
                self._receive(state, await self._next_event(state))
        except ReplicaGone as gone:
            logger.error("%s", gone)
            await state.replica.close()
        except asyncio.CancelledError:
            await state.replica.close(DRAIN_S)
            raise
        finally:
            self.replica_states.remove(state)
            self._on_gone(state)

    async def _next_event(self, state: ReplicaState) -> Event:
        limit_s = FROZEN_AFTER_S if state.ready else STARTUP_LIMIT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await state.replica.receive()
        raise ReplicaGone(f"{state.replica.name} has been silent for {limit_s:.0f} s: frozen")

    def _receive(self, state: ReplicaState, event: Event) -> None:
        match event:
            case Heartbeat():
                state.on_heartbeat(event, time.monotonic())
            case Credit():
                state.ready = True
                state.credit += event.count
                state.num_slots = event.num_slots or state.num_slots
                self._on_event(state, event)
            case _:
                self._on_event(state, event)
