"""Keeps every replica alive: starts it, watches two signals of life, replaces it when it dies or hangs.

Frozen is a replica whose heart has stopped; hung is one whose heart beats while its engine, with work to
do, takes no step. A large batch on a small machine is neither: the limit grows with the longest step seen.
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
class Link:
    """What this side knows of one live replica."""

    replica: Replica
    ready: bool = False
    credit: int = 0
    num_slots: int = 0
    in_flight: set[ChunkId] = field(default_factory=set)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(num_steps=0))
    progress_at: float = field(default_factory=time.monotonic)
    longest_step_s: float = 0.0

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
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
        on_event: Callable[[Link, Event], None],
        on_gone: Callable[[Link], None],
        on_given_up: Callable[[], None],
    ) -> None:
        self.links: list[Link] = []
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
            asyncio.create_task(self._keep(index), name=f"supervise replica {index}")
            for index in range(self._num_replicas)
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, index: int) -> None:
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            link = Link(await self._executor.launch(index))
            await self._attend(link)
            failed_starts = 0 if link.ready else failed_starts + 1
            await asyncio.sleep(min(MAX_PAUSE_S, 2.0**failed_starts - 1.0))
        logger.error("replica %d failed to start %d times: given up", index, failed_starts)
        self._num_given_up += 1
        if self.given_up:
            self._on_given_up()

    async def _attend(self, link: Link) -> None:
        """From launch to the end of one replica."""
        self.links.append(link)
        try:
            while True:
                self._receive(link, await self._next_event(link))
        except ReplicaGone as gone:
            logger.error("%s", gone)
            await link.replica.close()
        except asyncio.CancelledError:
            await link.replica.close(DRAIN_S)
            raise
        finally:
            self.links.remove(link)
            self._on_gone(link)

    async def _next_event(self, link: Link) -> Event:
        limit_s = FROZEN_AFTER_S if link.ready else STARTUP_LIMIT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await link.replica.receive()
        raise ReplicaGone(f"{link.replica.name} has been silent for {limit_s:.0f} s: frozen")

    def _receive(self, link: Link, event: Event) -> None:
        match event:
            case Heartbeat():
                link.beat(event, time.monotonic())
            case Credit():
                link.ready = True
                link.credit += event.count
                link.num_slots = event.num_slots or link.num_slots
                self._on_event(link, event)
            case _:
                self._on_event(link, event)
