"""The objects that all routes share, and the limit of realtime sessions."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, cast

from starlette.requests import HTTPConnection, Request

from asr_server import metrics
from asr_server.api.intake.admission import AdmissionLimiter, Places
from asr_server.api.intake.form import ReadingTurns
from asr_server.api.intake.upload import MEMORY_BYTES, UploadStore
from asr_server.api.middleware.request_log import Observer
from asr_server.api.models.registry import AllowedModels, ModelRegistry, Models
from asr_server.api.models.served_model import RETRY_AFTER_S
from asr_server.audio.pool import PreprocessPool
from asr_server.config import Settings, naming
from asr_server.core import SpeakerCount
from asr_server.errors import SessionsTaken
from asr_server.metrics import Account
from asr_server.transcription import Labeller

SERVICE_RESTART: Final = 1012  # the official client connects again


class Caller(NamedTuple):
    digest: bytes  # of the key, which signs client secrets
    account: Account | None = None  # of a key that has a name


NOBODY: Final = Caller(secrets.token_bytes(32))  # who asks a server without keys


class Keys(Protocol):
    @property
    def required(self) -> bool: ...
    @property
    def accounts(self) -> Sequence[Account]: ...
    @property
    def is_stale(self) -> bool: ...
    def check(self, authorization: str) -> Caller: ...
    def check_admin(self, authorization: str) -> Caller: ...
    def find(self, given: str) -> Caller | None: ...
    def sign(self, message: bytes, caller: Caller) -> bytes: ...
    def signer_of(self, message: bytes, signature: bytes) -> Caller | None: ...


class _Session(Protocol):
    def end(self, code: int, reason: str) -> None: ...


class RealtimeSessions:
    def __init__(self, max_sessions: int, is_shared: bool = False) -> None:
        self.is_draining = False
        self.num_started = 0
        self.num_rejected = 0
        self.num_turns = 0  # completed or failed
        self._max_sessions = max_sessions
        self._places = Places(max_sessions, is_shared)
        self._active: set[_Session] = set()
        self._is_empty = asyncio.Event()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def require_place(self, key: str = "") -> None:
        """Raises SessionsTaken."""
        if self._places.are_taken(key):
            open_now = f"{self._max_sessions} realtime sessions are open"
            if self._places.num_free:
                open_now = f"This key's share of {self._max_sessions} realtime sessions is open"
            raise SessionsTaken(f"{open_now}: {naming('max_realtime_sessions')}.", RETRY_AFTER_S)

    @contextmanager
    def enter(self, session: _Session, key: str = "") -> Iterator[None]:
        """Raises SessionsTaken."""
        self.num_rejected += self._places.are_taken(key)
        self.require_place(key)
        self._places.take(key)
        self.num_started += 1
        self._active.add(session)
        self._is_empty.clear()
        try:
            yield
        finally:
            self._places.release(key)
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


class FollowSpeakers(Protocol):
    async def __call__(
        self, count: SpeakerCount, names: Sequence[str], references: Sequence[str], pool: PreprocessPool
    ) -> Labeller:
        """Args:
        references: data URLs of known voices, in the order of `names`.
        """


@dataclass
class AppState:
    settings: Settings
    models: ModelRegistry
    pool: PreprocessPool
    admission: AdmissionLimiter
    uploads: UploadStore
    reading_turns: ReadingTurns
    realtime: RealtimeSessions
    api_keys: Keys
    observers: tuple[Observer, ...]
    follow_speakers: FollowSpeakers
    started_at: int  # Unix seconds

    @property
    def max_upload_bytes(self) -> int:
        """Return the size of the largest upload that settings and temporary folder allow."""
        try:
            return min(self.settings.max_upload_bytes, self.uploads.largest_bytes)
        except OSError:  # no folder
            return min(self.settings.max_upload_bytes, MEMORY_BYTES)

    @property
    def is_idle(self) -> bool:
        return not (self.admission.num_open or self.realtime.num_active)


def get_state(connection: HTTPConnection) -> AppState:
    return cast(AppState, connection.app.state.server)


async def require_key(request: Request) -> None:
    """Raises InvalidApiKey."""
    set_caller(request, get_state(request).api_keys.check(request.headers.get("authorization", "")))


async def require_admin_key(request: Request) -> None:
    """Raises InvalidApiKey, AdminRequired."""
    set_caller(request, get_state(request).api_keys.check_admin(request.headers.get("authorization", "")))


async def require_azure_key(request: Request) -> None:
    """Take the key from `api-key` or the usual header. Raises InvalidApiKey."""
    if key := request.headers.get("api-key"):
        set_caller(request, get_state(request).api_keys.check(f"Bearer {key}"))
    else:
        await require_key(request)


# -- The caller of a request ---------------------------------------------------------------------------------

_CALLER: Final = "caller"  # in the state of a request


def set_caller(connection: HTTPConnection, caller: Caller) -> None:
    connection.scope["state"][_CALLER] = caller
    metrics.current_request_stats().account = caller.account


def caller_of(connection: HTTPConnection) -> Caller:
    return cast(Caller, connection.scope["state"].get(_CALLER, NOBODY))


def models_of(connection: HTTPConnection) -> Models:
    """Return the models that the request's key may use."""
    models, account = get_state(connection).models, caller_of(connection).account
    names = account.models if account else None
    return models if names is None else AllowedModels(models, names)


@contextmanager
def metered(connection: HTTPConnection) -> Iterator[None]:
    """Hold a request to its key's limits, and count it as use. Raises RateLimited."""
    metrics.current_request_stats().is_metered = True
    account = caller_of(connection).account
    with account.enter() if account else contextlib.nullcontext():
        yield
