"""All realtime sessions of this process: how many there may be, and how they end when the server does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from asr_server.config import naming
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import Overloaded

RETRY_AFTER_S: Final = 5
INTERIM_SHARE: Final = 8  # of the slots, or fewer, are at work when an interim reading may begin
SERVICE_RESTART: Final = 1012  # the official client connects again


class _Session(Protocol):
    def end(self, code: int, reason: str) -> None:
        """Commits what was said, sends the text, and closes."""


class RealtimeSessions:
    def __init__(self, max_sessions: int, dispatcher: Dispatcher) -> None:
        self.is_draining = False
        self.num_started = 0
        self.num_rejected = 0
        self.num_turns = 0  # completed or failed
        self._dispatcher = dispatcher
        self._max_sessions = max_sessions
        self._active: set[_Session] = set()
        self._is_empty = asyncio.Event()

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def may_read_interim(self) -> bool:
        """Final text comes first: interim readings are left out while the engine has more to do."""
        return self._dispatcher.num_chunks < max(1, self._dispatcher.num_slots // INTERIM_SHARE)

    @contextmanager
    def enter(self, session: _Session) -> Iterator[None]:
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
