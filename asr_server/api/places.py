"""A number of places that keys share, so that none can take them all.

A key may hold three times as many as are free: dynamic thresholds (Choudhury and Hahne, IEEE/ACM ToN 1998).
Alone it gets three quarters; several that want more get equal shares.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final

SHARE: Final = 3


class Places:
    """Not shared, the first to come gets them."""

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
