"""Limit the requests in flight, and say to refused clients when to return."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from asr_server.config import naming
from asr_server.errors import Overloaded

SHARE: Final = 3  # times what is free
RECENT_SHARE: Final = 0.1  # of the last request, in the mean time that a place is held


class Places:
    """A number of places that keys share, so that none can take them all.

    A key may hold three times as many as are free: dynamic thresholds (Choudhury and Hahne, IEEE/ACM ToN
    1998). Alone it gets three quarters; several that want more get equal shares. Not shared, the first to
    come gets them.
    """

    def __init__(self, num_places: int, is_shared: bool = False) -> None:
        self.num_free = num_places
        self._is_shared = is_shared
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def num_held(self, key: str) -> int:
        return self._held[key]

    def are_taken(self, key: str) -> bool:
        """Return whether a request of this key would wait."""
        return key in self._waiting or not self._has_room(key)

    def _has_room(self, key: str) -> bool:
        return self.num_free > 0 and (not self._is_shared or self._held[key] < SHARE * self.num_free)

    def take(self, key: str) -> None:
        self.num_free -= 1
        self._held[key] += 1

    async def acquire(self, key: str) -> None:
        if not self.are_taken(key):
            self.take(key)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(key, place)
            else:  # it was given in the same moment
                self.release(key)
            raise

    def _leave(self, key: str, place: asyncio.Future[None]) -> None:
        line = self._waiting.get(key, deque())
        if place in line:
            line.remove(place)
            self._close_if_empty(key)

    def release(self, key: str) -> None:
        self.num_free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        while (next_key := self._next_key()) is not None:
            self._give(next_key)

    def _next_key(self) -> str | None:
        keys = filter(self._has_room, self._waiting)
        return min(keys, key=self.num_held, default=None)

    def _give(self, key: str) -> None:
        place = self._waiting[key].popleft()
        self._close_if_empty(key)
        if not place.done():
            self.take(key)
            place.set_result(None)

    def _close_if_empty(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]


class AdmissionLimiter:
    """A request holds a place from its complete arrival to its complete transcript.

    Slow uploads and readers cost a connection, not a place. When all places are taken, requests wait in a
    line that is as long. Keys with names share places and line; requests without one count as one key.
    """

    def __init__(
        self, max_requests: int, clock: Callable[[], float] = time.monotonic, is_shared: bool = False
    ) -> None:
        self.num_rejected = 0
        self.num_open = 0
        self.num_in_flight = 0
        self.num_places = max_requests
        self._places = Places(max_requests, is_shared)
        self._line = Places(max_requests, is_shared)
        self._clock = clock
        self._mean_held_s = 1.0

    @property
    def num_waiting(self) -> int:
        return self.num_places - self._line.num_free

    @contextmanager
    def enter(self, key: str = "") -> Iterator[None]:
        """Count a request from its headers to the end of its reply.

        Raises Overloaded before the upload if the line is full.
        """
        self._require_room(key)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @asynccontextmanager
    async def acquire(self, key: str = "") -> AsyncIterator[None]:
        """Wait in line for a place. Raises Overloaded when the line is full."""
        self._require_room(key)
        self._line.take(key)
        try:
            await self._places.acquire(key)
        finally:
            self._line.release(key)
        self.num_in_flight += 1
        began_at = self._clock()
        try:
            yield
        finally:
            self._mean_held_s += RECENT_SHARE * (self._clock() - began_at - self._mean_held_s)
            self.num_in_flight -= 1
            self._places.release(key)

    def _require_room(self, key: str) -> None:
        if self._places.are_taken(key) and self._line.are_taken(key):
            self.num_rejected += 1
            raise self._refusal()

    def _refusal(self) -> Overloaded:
        subject = "This key's share of the" if self._places.num_free or self._line.num_free else "All"
        line_lasts_s = self._mean_held_s * (1 + self.num_waiting / self.num_places)
        return Overloaded(
            f"{subject} {self.num_places} places for requests and as many in line are taken: "
            f"{naming('max_concurrent_requests')}.",
            line_lasts_s,
        )
