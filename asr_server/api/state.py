"""The objects that all routes share, and the limit of realtime sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, cast

from starlette.requests import HTTPConnection, Request

from asr_server.api.admission import AdmissionLimiter
from asr_server.api.auth import ApiKeys
from asr_server.api.form import ReadingTurns
from asr_server.api.models import ModelRegistry
from asr_server.api.served_model import RETRY_AFTER_S
from asr_server.api.upload import UploadStore
from asr_server.audio.pool import PreprocessPool
from asr_server.config import Settings, naming
from asr_server.errors import SessionsTaken

SERVICE_RESTART: Final = 1012  # the official client connects again


class _Session(Protocol):
    def end(self, code: int, reason: str) -> None: ...


class RealtimeSessions:
    def __init__(self, max_sessions: int) -> None:
        self.is_draining = False
        self.num_started = 0
        self.num_rejected = 0
        self.num_turns = 0  # completed or failed
        self._max_sessions = max_sessions
        self._active: set[_Session] = set()
        self._is_empty = asyncio.Event()

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def _has_place(self) -> bool:
        return len(self._active) < self._max_sessions

    def require_place(self) -> None:
        """Raises SessionsTaken."""
        if not self._has_place:
            raise SessionsTaken(
                f"{self._max_sessions} realtime sessions are open: {naming('max_realtime_sessions')}.",
                RETRY_AFTER_S,
            )

    @contextmanager
    def enter(self, session: _Session) -> Iterator[None]:
        """Raises SessionsTaken."""
        self.num_rejected += not self._has_place
        self.require_place()
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
        """End every session in order; wait at most `limit_s`."""
        self.is_draining = True
        for session in self._active:
            session.end(SERVICE_RESTART, "The server is shutting down.")
        if self._active:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._is_empty.wait()


@dataclass
class AppState:
    settings: Settings
    models: ModelRegistry
    pool: PreprocessPool
    admission: AdmissionLimiter
    uploads: UploadStore
    reading_turns: ReadingTurns
    realtime: RealtimeSessions
    api_keys: ApiKeys
    started_at: int  # Unix seconds

    @property
    def is_idle(self) -> bool:
        return not (self.admission.num_open or self.realtime.num_active)


def get_state(connection: HTTPConnection) -> AppState:
    return cast(AppState, connection.app.state.server)


async def require_key(request: Request) -> None:
    """Raises InvalidApiKey."""
    get_state(request).api_keys.check(request.headers.get("authorization", ""))


async def require_admin_key(request: Request) -> None:
    """Raises AdminOff, InvalidApiKey."""
    get_state(request).api_keys.check_admin(request.headers.get("authorization", ""))


async def require_azure_key(request: Request) -> None:
    """Take the key from `api-key` or the usual header. Raises InvalidApiKey."""
    if key := request.headers.get("api-key"):
        get_state(request).api_keys.check(f"Bearer {key}")
    else:
        await require_key(request)
