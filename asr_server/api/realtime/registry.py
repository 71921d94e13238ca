"""All realtime sessions of this process: how many there may be, and how they end when the server does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from asr_server.config import naming
from asr_server.errors import Overloaded

if TYPE_CHECKING:
    from asr_server.api.realtime.session import RealtimeSession

RETRY_AFTER_S: Final = 5
INTERIM_SHARE: Final = 8
SERVICE_RESTART: Final = 1012  # the official client connects again


class InterimLimiter:
    """Interim readings take an eighth of the slots at most, over all sessions: final text comes first."""

    def __init__(self, num_slots: Callable[[], int]) -> None:
        self._num_slots = num_slots
        self._num_running = 0

    def acquire(self) -> bool:
        if self._num_running >= max(1, self._num_slots() // INTERIM_SHARE):
            return False
        self._num_running += 1
        return True

    def release(self) -> None:
        self._num_running -= 1


class RealtimeSessions:
    def __init__(self, max_sessions: int, num_slots: Callable[[], int]) -> None:
        self.is_draining = False
        self.num_started = 0
        self.num_rejected = 0
        self.num_turns = 0  # completed or failed
        self.interims = InterimLimiter(num_slots)
        self._max_sessions = max_sessions
        self._active: set[RealtimeSession] = set()
        self._is_empty = asyncio.Event()

    @property
    def num_active(self) -> int:
        return len(self._active)

    @contextmanager
    def enter(self, session: RealtimeSession) -> Iterator[None]:
        """Raises Overloaded."""
        if len(self._active) >= self._max_sessions:
            self.num_rejected += 1
            raise Overloaded(
                f"{self._max_sessions} realtime sessions are open: {naming('max_realtime_sessions')}.",
                RETRY_AFTER_S,
            )
        self.num_started += 1
        self._active.add(session)
        self._is_empty.clear()
        try:
            yield
        finally:
            self._active.discard(session)
            if not self._active:
                self._is_empty.set()

    async def drain(self, limit_s: float) -> None:
        """Every session commits what was said, sends the text, and closes; later ones are left."""
        self.is_draining = True
        for session in self._active:
            session.end(SERVICE_RESTART, "The server is shutting down.")
        if self._active:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._is_empty.wait()
