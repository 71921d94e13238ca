"""The objects that all routes share, created once in `create_app`, and the limits on requests and sessions.

`AdmissionLimiter` limits how many requests are in flight, and tells the others when to try again:
`transcribe.py` turns a request away before it reads the body, and takes its place once the body is here.
`RealtimeSessions` limits the sessions of `/v1/realtime`, and ends them when the server ends. Runs in the API
process, on its event loop; never blocks it. Used by `api`, `realtime` and `wyoming.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, cast

from starlette.requests import HTTPConnection, Request

from asr_server.api.auth import ApiKeys
from asr_server.api.errors import MAX_RETRY_AFTER_S
from asr_server.api.form import ReadingTurns, UploadMemory
from asr_server.audio.limits import AudioLimits
from asr_server.audio.pool import PreprocessPool
from asr_server.config import Settings, naming
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import EngineUnavailable, Overloaded, SessionsTaken, ShuttingDown
from asr_server.transcription import Transcriber

RETRY_AFTER_S: Final = 5
INTERIM_SHARE: Final = 8  # of the slots, or fewer, are at work when an interim reading may begin
SERVICE_RESTART: Final = 1012  # the official client connects again


class _Session(Protocol):
    def end(self, code: int, reason: str) -> None:
        """Commits the audio so far, sends its text, and closes."""


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
        """Whether the engine has time for interim readings: final text comes before them."""
        return self._dispatcher.num_chunks < max(1, self._dispatcher.num_slots // INTERIM_SHARE)

    def require_place(self) -> None:
        """Raises SessionsTaken."""
        if len(self._active) >= self._max_sessions:
            self.num_rejected += 1
            raise SessionsTaken(
                f"{self._max_sessions} realtime sessions are open: {naming('max_realtime_sessions')}.",
                RETRY_AFTER_S,
            )

    @contextmanager
    def enter(self, session: _Session) -> Iterator[None]:
        """Raises SessionsTaken."""
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
        """Ends every session: each commits its audio, sends its text, and closes. Waits `limit_s` at most."""
        self.is_draining = True
        for session in self._active:
            session.end(SERVICE_RESTART, "The server is shutting down.")
        if self._active:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._is_empty.wait()


_WEIGHT: Final = 0.1  # of the newest value in a mean
MIN_RETRY_AFTER_S: Final = 1.0
SLACK: Final = 1.5  # places do not become free evenly


class _Mean:
    """A mean in which the latest values count most."""

    def __init__(self, first_guess: float) -> None:
        self.value = first_guess
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(_WEIGHT, 1 / self._count) * (value - self.value)


class AdmissionLimiter:
    """A request holds a place from when it has arrived whole until its transcript is complete.

    Sending and reading are left out: clients that upload or read slowly cost a connection, not a place.
    """

    def __init__(self, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_rejected = 0
        self.num_open = 0
        self._max_requests = max_requests
        self._clock = clock
        self._started_at: list[float] = []
        self._full_since = 0.0  # when the last place was taken
        self._interval_s = _Mean(1.0 / max_requests)  # between places that become free while all are taken
        self._next_turn_at = 0.0

    @property
    def num_in_flight(self) -> int:
        return len(self._started_at)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Counts a request from its headers to the end of its reply.

        Raises Overloaded when there is no place now, which saves the client the upload.
        """
        self._check()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Raises Overloaded."""
        self._check()
        started_at = self._clock()
        self._started_at.append(started_at)
        if self._is_full:
            self._full_since = started_at
        try:
            yield
        finally:
            if self._is_full:
                self._interval_s.add(self._clock() - self._full_since)
            self._started_at.remove(started_at)

    def _check(self) -> None:
        if not self._is_full:
            return
        self.num_rejected += 1
        raise Overloaded(
            f"{self._max_requests} requests are in flight already: {naming('max_concurrent_requests')}.",
            self._next_turn_s(),
        )

    @property
    def _is_full(self) -> bool:
        return self.num_in_flight >= self._max_requests

    def _next_turn_s(self) -> float:
        """Return the seconds until this client may try again.

        Each gets its own time, as fast as places become free. With one time, all would come back together,
        and most would be turned away again. A burst on a quiet server finds no place for longer than any
        request took before. So nobody comes back before three times the time in which no place became free:
        clients try three times in all.
        """
        now = self._clock()
        earliest = now + max(MIN_RETRY_AFTER_S, 3 * (now - self._full_since))
        turn_at = max(self._next_turn_at + SLACK * self._interval_s.value, earliest)
        self._next_turn_at = min(turn_at, now + MAX_RETRY_AFTER_S)
        return self._next_turn_at - now


@dataclass
class AppState:
    settings: Settings
    dispatcher: Dispatcher
    pool: PreprocessPool
    transcriber: Transcriber
    admission: AdmissionLimiter
    upload_memory: UploadMemory
    reading_turns: ReadingTurns
    audio_limits: AudioLimits
    realtime: RealtimeSessions
    api_keys: ApiKeys
    started_at: int  # Unix seconds

    @property
    def is_idle(self) -> bool:
        """Whether there is no request for a transcript, from its headers on, and no realtime session."""
        return not (self.admission.num_open or self.realtime.num_active)

    def check_health(self) -> None:
        """Raises EngineUnavailable once every replica has been given up for good."""
        if self.dispatcher.supervisor.given_up:
            raise EngineUnavailable("The engine has failed and is not being restarted.", retry_after_s=60)

    def require_engine(self) -> None:
        """Raises EngineUnavailable while no replica can take new work."""
        if self.dispatcher.draining:
            raise ShuttingDown
        self.check_health()
        if not self.dispatcher.ready:
            raise EngineUnavailable("The engine is starting.", retry_after_s=5)


def get_state(connection: HTTPConnection) -> AppState:
    return cast(AppState, connection.app.state.server)


async def require_key(request: Request) -> None:
    """Raises InvalidApiKey."""
    get_state(request).api_keys.check(request.headers.get("authorization", ""))
