"""Finds the chunk that ends replicas, without harm to those beside it.

When a replica dies, freezes or hangs, any of its chunks may have been the reason. They are suspects until
they have a result, and are decoded one at a time with nothing beside them. While there are any, one replica
is reserved for them: it finishes what it has, then takes one suspect after another.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from asr_server.core import ChunkId
from asr_server.dispatch.queue import PendingChunk, RequestHandle
from asr_server.dispatch.replica_state import ReplicaState


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
        """Those that have ended fewer replicas are tried first, so that the innocent wait least."""
        order = (chunk.submit.id.attempt, chunk.finish_tag, next(self._sequence))
        heapq.heappush(self._suspects, (*order, chunk))

    def reserved(self, states: list[ReplicaState]) -> ReplicaState | None:
        """The replica that takes suspects only: the one closest to having nothing to do."""
        if self._trial and self._trial.is_running:
            return self._trial.state
        if not self._suspects:
            return None
        ready = [state for state in states if state.ready]
        return min(ready, key=lambda state: len(state.in_flight), default=None)

    def next_trial(self, states: list[ReplicaState]) -> tuple[ReplicaState, PendingChunk] | None:
        """A suspect, and the idle replica on which it is to be tried now."""
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
