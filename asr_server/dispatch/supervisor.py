"""Keep each replica running: launch, watch, close, pause, again.

Knows no requests. `Executor` and `Replica` are the protocols of the executors.

A replica is frozen when nothing comes from it, and hung when heartbeats come without progress of steps or
layers. A slow machine is neither: `Patience` grows with the longest wait, and with each replica it ended.
Limits are counted in ticks of this event loop, so its own pauses count for nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from asr_server import metrics
from asr_server.core import ChunkId
from asr_server.transport.messages import (
    FROZEN_AFTER_S,
    SILENT_STARTUP_LIMIT_S,
    Command,
    Credit,
    Event,
    Heartbeat,
    StartFailed,
)


class ReplicaGone(Exception):
    def __init__(self, message: str, reason: metrics.RestartReason = "exited") -> None:
        super().__init__(message)
        self.reason = reason


class StartImpossible(Exception):
    pass


class Replica(Protocol):
    name: str

    @property
    def pid(self) -> int | None:
        """Return its process on this machine; None for a thread or another host's."""

    def send(self, command: Command) -> None:
        """Never blocks. Raises ReplicaGone."""

    async def receive(self) -> list[Event]:
        """Return the next events, at least one. Raises ReplicaGone when none can come."""

    async def close(self, drain_s: float = 0.0) -> None: ...


class Executor(Protocol):
    async def start(self) -> int:
        """Return how many replicas to launch; called once. Raises StartImpossible."""

    async def launch(self, index: int) -> Replica:
        """Start a replica; its first `Credit` makes it ready. May wait for a place without limit."""

    async def stop(self) -> None:
        """Called once, after all replicas are closed or `start` has raised."""
        return


@dataclass(frozen=True)
class ReplicaLimits:
    tick_s: float = 0.5
    frozen_after_s: float = FROZEN_AFTER_S
    startup_s: float = 900.0  # from the launch to the first credit
    hung_after_s: float = 30.0  # without progress
    hung_after_waits: float = 10.0  # times the longest wait for progress of late
    hung_at_most_s: float = 600.0
    pause_s: float = 30.0  # before another launch, at most
    steady_s: float = 10.0  # a replica that ends sooner after it was ready is launched again after a pause


USUAL_LIMITS = ReplicaLimits()
PATIENCE_KEPT = 0.999  # at each heartbeat with progress: half of it is lost in 12 minutes


@dataclass
class Patience:
    """The longest recent wait for progress, kept across replacements."""

    longest_wait_s: float = 0.0

    def hung_after_s(self, limits: ReplicaLimits) -> float:
        measured_s = limits.hung_after_waits * self.longest_wait_s
        return min(max(limits.hung_after_s, measured_s), limits.hung_at_most_s)

    def on_progress(self, wait_s: float) -> None:
        self.longest_wait_s = max(wait_s, self.longest_wait_s * PATIENCE_KEPT)

    def on_hung(self, wait_s: float, limits: ReplicaLimits) -> None:
        """Allow the next replica twice as long."""
        self.longest_wait_s = max(self.longest_wait_s, 2.0 * wait_s / limits.hung_after_waits)


@dataclass(eq=False)
class ReplicaState:
    replica: Replica
    limits: ReplicaLimits = USUAL_LIMITS
    patience: Patience = field(default_factory=Patience)
    ready: bool = False
    credit: int = 0
    num_slots: int = 0
    in_flight: set[ChunkId] = field(default_factory=set)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(num_steps=0))
    watched_s: float = 0.0  # since the launch; the next three are moments on this clock
    heard_at_s: float = 0.0
    progress_at_s: float = 0.0
    ready_at_s: float = 0.0
    ended_with_chunks: bool = False  # one of which may have ended it
    ended_by: metrics.RestartReason = "failed_start"  # once it has ended

    def on_heard(self) -> None:
        self.heard_at_s = self.watched_s

    def on_ready(self) -> None:
        self.ready = True
        self.ready_at_s = self.progress_at_s = self.watched_s

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self.ready and heartbeat.progress > self.heartbeat.progress:
            self.patience.on_progress(self.watched_s - self.progress_at_s)
            self.progress_at_s = self.watched_s
        self.heartbeat = heartbeat

    def on_tick(self) -> None:
        limits = self.limits
        self.watched_s += limits.tick_s
        name, silent_s = self.replica.name, self.watched_s - self.heard_at_s
        if silent_s > (limits.frozen_after_s if self.ready else SILENT_STARTUP_LIMIT_S):
            raise ReplicaGone(f"{name} has been silent for {silent_s:.0f} s: frozen", "frozen")
        if not self.ready and self.watched_s > limits.startup_s:
            raise ReplicaGone(f"{name} was not ready {self.watched_s:.0f} s after its launch", "not_ready")
        stalled_s = self.watched_s - self.progress_at_s
        if self.ready and stalled_s > self.patience.hung_after_s(limits):
            self.patience.on_hung(stalled_s, limits)
            raise ReplicaGone(f"{name} has made no progress for {stalled_s:.0f} s: hung", "hung")


MAX_FAILED_STARTS = 3  # before any replica was ready
MAX_DOUBLINGS = 10  # of the pause
READY_POLL_S = 0.05
DRAIN_S = 2.0  # for a replica to leave by itself at shutdown, when its work is done

logger = logging.getLogger(__name__)


class Supervisor:
    def __init__(
        self,
        executor: Executor,
        on_events: Callable[[ReplicaState, list[Event]], None],
        on_gone: Callable[[ReplicaState], None],
        on_given_up: Callable[[], None],
        limits: ReplicaLimits = USUAL_LIMITS,
    ) -> None:
        self.limits = limits
        self.replica_states: list[ReplicaState] = []
        self.was_ready = False  # at least one replica, at least once
        self.last_failure = ""  # in words, for whoever asks why there is no engine
        self._executor = executor
        self.num_replicas = 1  # as many as there are to be, once the executor has said how many
        self._on_events = on_events
        self._on_gone = on_gone
        self._on_given_up = on_given_up
        self.start_s = 0.0  # that the last start took, from the launch to the first credit
        self._num_given_up = 0
        self._lost: set[str] = set()  # replicas that have ended, by name, until others are in their place
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def given_up(self) -> bool:
        """Return whether no replica is left or will be launched."""
        return self._num_given_up == self.num_replicas

    @property
    def failed_to_start(self) -> bool:
        """Return whether it gave up before any replica was ready: the setup is at fault."""
        return self.given_up and not self.was_ready and not self._is_stopping

    async def until_ready(self) -> None:
        while not (self.was_ready or self.given_up or self._is_stopping):  # noqa: ASYNC110
            await asyncio.sleep(READY_POLL_S)  # the handler of a signal cannot set an event

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise_all(), name="supervise replicas")

    def expect_ends(self) -> None:
        """Stop reporting ended replicas: group signals reach loading ones too. Signal-safe."""
        self._is_stopping = True

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _supervise_all(self) -> None:
        try:
            self.num_replicas = await self._executor.start()
            async with asyncio.TaskGroup() as group:
                for index in range(self.num_replicas):
                    group.create_task(self._supervise(index), name=f"supervise replica {index}")
        except StartImpossible as error:
            self._note(error)
            self._num_given_up = self.num_replicas
            self._on_given_up()
        finally:
            await self._executor.stop()

    async def _supervise(self, index: int) -> None:
        """Relaunch a replica for ever; give up only before any was ready."""
        num_starts = early_ends = 0
        patience = Patience()
        while True:
            state: ReplicaState | None = None
            try:
                replica = await self._executor.launch(index)
                state = await self._run(ReplicaState(replica, self.limits, patience))
            except StartImpossible as error:
                self._note(error)
                if not self.was_ready:
                    break
            except Exception as error:
                self._log(f"replica {index} failed: {type(error).__name__}: {error}")
            num_starts += 1
            if num_starts >= MAX_FAILED_STARTS and not self.was_ready:  # so all of them have failed
                logger.error("replica %d failed to start %d times: given up", index, num_starts)
                break
            early_ends = _early_ends(early_ends, state)
            await asyncio.sleep(min(self.limits.pause_s, 2.0 ** min(early_ends, MAX_DOUBLINGS) - 1.0))
            metrics.replica_restarts.labels(state.ended_by if state else "failed_start").inc()
        self._num_given_up += 1
        if self.given_up:
            self._on_given_up()

    async def _run(self, state: ReplicaState) -> ReplicaState:
        self.replica_states.append(state)
        drain_s = 0.0
        try:
            await self._watch(state)
        except ReplicaGone as gone:
            self._log(str(gone))
            self._lost.add(state.replica.name)
            if state.ready or gone.reason != "exited":
                state.ended_by = gone.reason
        except asyncio.CancelledError:
            drain_s = DRAIN_S if state.ready else 0.0
            raise
        finally:
            self.replica_states.remove(state)
            state.ended_with_chunks = bool(state.in_flight)
            try:
                self._on_gone(state)
            finally:
                await _finish(state.replica.close(drain_s))
        return state

    async def _watch(self, state: ReplicaState) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive_all(state))
                group.create_task(_tick(state))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _receive_all(self, state: ReplicaState) -> None:
        while True:
            events = await state.replica.receive()
            state.on_heard()
            for event in events:
                match event:
                    case Heartbeat():
                        state.on_heartbeat(event)
                    case StartFailed():
                        raise StartImpossible(event.reason)
                    case Credit():
                        self._on_credit(state, event)
            self._on_events(state, events)

    def _on_credit(self, state: ReplicaState, credit: Credit) -> None:
        if not state.ready:
            state.on_ready()
            self.was_ready, self.start_s = True, state.ready_at_s
            if state.replica.name in self._lost:
                self._lost.remove(state.replica.name)
                logger.info("%s is back", state.replica.name)
        state.credit += credit.count
        state.num_slots = credit.num_slots or state.num_slots

    def _note(self, impossible: StartImpossible) -> None:
        if self.was_ready:
            self._log(str(impossible))
        self.last_failure = str(impossible)

    def _log(self, failure: str) -> None:
        self.last_failure = failure
        logger.log(logging.DEBUG if self._is_stopping else logging.ERROR, "%s", failure)


async def _finish(ending: Coroutine[None, None, None]) -> None:
    """Await a replica's end even during a stop, to close what it holds."""
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _early_ends(before: int, state: ReplicaState | None) -> int:
    """Count early ends in a row; those that a chunk may have caused count as one."""
    if state is None or not state.ready:
        return before + 1
    if state.watched_s - state.ready_at_s >= state.limits.steady_s:
        return 0
    return max(1, before) if state.ended_with_chunks else before + 1


async def _tick(state: ReplicaState) -> None:
    while True:
        await asyncio.sleep(state.limits.tick_s)
        state.on_tick()
