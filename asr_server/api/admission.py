"""Limit the requests in flight, and tell refused clients when to return.

A request is refused before its body is read, or after it if the line is full.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from asr_server.api.errors import MAX_WAIT_S, MIN_WAIT_S
from asr_server.api.places import Places
from asr_server.config import naming
from asr_server.errors import Overloaded

LINE_SHARE: Final = 4  # a line is that much shorter than there are places
TURN_LASTS_S: Final = 30.0  # for the spread of the header's value, and for the upload
FIRST_INTERVAL_S: Final = 0.05  # between two places, before any was measured
FIRST_SHARE: Final = 16  # the guess weighs as much as that share of the places


class Pace:
    """Measure how fast places become free while at least half are taken."""

    def __init__(self, num_places: int, clock: Callable[[], float]) -> None:
        self._num_places = num_places
        self._clock = clock
        self._num_freed = max(1.0, num_places / FIRST_SHARE)
        self._busy_s = FIRST_INTERVAL_S * self._num_freed
        self._measured_at = clock()

    def before_taking(self, num_taken: int) -> None:
        self._add_time(num_taken)

    def before_freeing(self, num_taken: int) -> None:
        if not self._add_time(num_taken):
            return
        self._num_freed += 1
        if self._num_freed > self._num_places:  # so that the latest count most
            self._num_freed /= 2
            self._busy_s /= 2

    def interval_s(self, num_taken: int) -> float:
        self._add_time(num_taken)
        return self._busy_s / self._num_freed

    def _add_time(self, num_taken: int) -> bool:
        now, is_busy = self._clock(), num_taken >= self._num_places / 2
        self._busy_s += (now - self._measured_at) * is_busy
        self._measured_at = now
        return is_busy


class AdmissionLimiter:
    """A request holds a place from its complete arrival to its complete transcript.

    Slow uploads and readers cost a connection, not a place. When all places are taken, requests wait in a
    short line. A refused client gets a turn, a time to return for a place: official clients return only
    twice. Keys with names share places and line; requests without one count as one key.
    """

    def __init__(
        self, max_requests: int, clock: Callable[[], float] = time.monotonic, is_shared: bool = False
    ) -> None:
        self.num_rejected = 0
        self.num_open = 0
        self.num_in_flight = 0
        self.num_places = max_requests
        self._places = Places(max_requests, is_shared)
        self._line_length = max(1, max_requests // LINE_SHARE)
        self._line = Places(self._line_length, is_shared)
        self._clock = clock
        self._pace = Pace(max_requests, clock)
        self._turns = defaultdict[str, list[float]](list)  # a heap for each key

    @property
    def num_waiting(self) -> int:
        return self._line_length - self._line.num_free

    @contextmanager
    def enter(self, is_first_try: bool = False, key: str = "") -> Iterator[None]:
        """Count a request from its headers to the end of its reply.

        Raises Overloaded before the upload if no place is free; only a later try may take a turn.
        """
        if self._places.are_taken(key) and (is_first_try or not self._take_turn(key)):
            raise self._refusal(key)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @asynccontextmanager
    async def acquire(self, key: str = "") -> AsyncIterator[None]:
        """Wait in line for a place. Raises Overloaded when the line is full."""
        if self._places.are_taken(key) and self._line.are_taken(key):
            raise self._refusal(key)
        self._line.take(key)
        try:
            await self._places.acquire(key)
        finally:
            self._line.release(key)
        self._pace.before_taking(self.num_in_flight)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self._pace.before_freeing(self.num_in_flight)
            self.num_in_flight -= 1
            self._places.release(key)

    def _take_turn(self, key: str) -> bool:
        now, turns = self._clock(), self._turns[key]
        while turns and turns[0] < now - TURN_LASTS_S:
            heapq.heappop(turns)
        has_turn = not self._line.are_taken(key) and bool(turns) and turns[0] <= now
        if has_turn:
            heapq.heappop(turns)
        return has_turn

    def _refusal(self, key: str) -> Overloaded:
        self.num_rejected += 1
        in_flight = f"{self.num_places} requests are in flight already"
        if self._places.num_free:
            in_flight = f"This key's share of {self.num_places} requests is in flight already"
        return Overloaded(f"{in_flight}: {naming('max_concurrent_requests')}.", self._next_turn_s(key))

    def _next_turn_s(self, key: str) -> float:
        """Add a turn behind all others of the key; return the seconds until it."""
        num_before = self._line.num_held(key) + len(self._turns[key])
        wait_s = (num_before + 1) * self._pace.interval_s(self.num_in_flight)
        if wait_s > MAX_WAIT_S:
            return MAX_WAIT_S  # without a turn, so that their number is bounded
        wait_s = max(MIN_WAIT_S, wait_s)
        heapq.heappush(self._turns[key], self._clock() + wait_s)
        return wait_s
