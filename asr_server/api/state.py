"""What all routes share: the places for requests and sessions, who asks, and the parts of the server."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, cast

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from asr_server import metrics
from asr_server.api.middleware import History
from asr_server.api.models import RETRY_AFTER_S, Models
from asr_server.api.request import TranscriptionRequest
from asr_server.api.upload import MEMORY_BYTES, Form, UploadStore
from asr_server.audio.recording import PreprocessPool
from asr_server.config import Settings, naming
from asr_server.core import SpeakerCount
from asr_server.errors import Overloaded, SessionsTaken
from asr_server.metrics import Account
from asr_server.transcription.transcriber import Labeller

SHARE: Final = 3  # times what is free
SERVICE_RESTART: Final = 1012  # the official client connects again
RECENT_SHARE: Final = 0.1  # of the last request, in the mean time that a place is held


class Places:
    """Places that keys share: a key may hold three times as many as are free.

    Dynamic thresholds (Choudhury and Hahne, IEEE/ACM ToN 1998). Alone a key gets three quarters; several get
    equal shares. Not shared, the first to come gets them.
    """

    def __init__(self, num_places: int, is_shared: bool = False) -> None:
        self.num_free = num_places
        self._is_shared = is_shared
        self._held = Counter[str]()
        self._waiting = defaultdict[str, deque[asyncio.Future[None]]](deque)

    def num_held(self, key: str) -> int:
        return self._held[key]

    def are_taken(self, key: str) -> bool:
        return bool(self._waiting[key]) or not self._has_room(key)

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
        self._waiting[key].append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given in the same moment
                self.release(key)
            elif place in self._waiting[key]:
                self._waiting[key].remove(place)
            raise

    def release(self, key: str) -> None:
        self.num_free += 1
        self._held[key] -= 1
        while keys := [key for key, line in self._waiting.items() if line and self._has_room(key)]:
            next_key = min(keys, key=self.num_held)
            place = self._waiting[next_key].popleft()
            if not place.done():
                self.take(next_key)
                place.set_result(None)


class AdmissionLimiter:
    """A request holds a place from its complete arrival to its complete transcript.

    When all places are taken, requests wait in a line that is as long. Requests without a key count as one.
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
        """Count a request from its headers to its reply's end. Raises Overloaded if the line is full."""
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
            subject = "This key's share of the" if self._places.num_free or self._line.num_free else "All"
            raise Overloaded(
                f"{subject} {self.num_places} places for requests and as many in line are taken: "
                f"{naming('max_concurrent_requests')}.",
                self._mean_held_s * (1 + self.num_waiting / self.num_places),
            )


EndSession = Callable[[int, str], None]  # with a code and a reason


class RealtimeSessions:
    def __init__(self, max_sessions: int, is_shared: bool = False) -> None:
        self.is_draining = False
        self.num_started = 0
        self.num_rejected = 0
        self.num_turns = 0  # completed or failed
        self._max_sessions = max_sessions
        self._places = Places(max_sessions, is_shared)
        self._active: set[EndSession] = set()
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
    def enter(self, end: EndSession, key: str = "") -> Iterator[None]:
        """Raises SessionsTaken."""
        self.num_rejected += self._places.are_taken(key)
        self.require_place(key)
        self._places.take(key)
        self.num_started += 1
        self._active.add(end)
        self._is_empty.clear()
        try:
            yield
        finally:
            self._places.release(key)
            self._active.discard(end)
            if not self._active:
                self._is_empty.set()

    async def drain(self, limit_s: float) -> None:
        self.is_draining = True
        for end in self._active:
            end(SERVICE_RESTART, "The server is shutting down.")
        if self._active:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._is_empty.wait()


class Caller(NamedTuple):
    digest: bytes  # of the key, which signs client secrets
    account: Account | None = None  # of a key that has a name


NOBODY: Final = Caller(secrets.token_bytes(32))  # who asks a server without keys


class Keys(Protocol):
    required: bool
    is_stale: bool

    @property
    def accounts(self) -> Sequence[Account]: ...
    def check(self, authorization: str) -> Caller: ...
    def check_admin(self, authorization: str) -> Caller: ...
    def find(self, given: str) -> Caller | None: ...
    def sign(self, message: bytes, caller: Caller) -> bytes: ...
    def signer_of(self, message: bytes, signature: bytes) -> Caller | None: ...


# Data URLs of known voices are in the order of their names.
FollowSpeakers = Callable[[SpeakerCount, Sequence[str], Sequence[str], PreprocessPool], Awaitable[Labeller]]


# Keep a request that is done without its client; return the answer.
TakeInBackground = Callable[[Request, Form, TranscriptionRequest], Awaitable[Response]]


@dataclass
class AppState:
    settings: Settings
    models: Models
    pool: PreprocessPool
    admission: AdmissionLimiter
    uploads: UploadStore
    realtime: RealtimeSessions
    api_keys: Keys
    history: History
    follow_speakers: FollowSpeakers
    started_at: int  # Unix seconds
    take_in_background: TakeInBackground | None = None

    @property
    def max_upload_bytes(self) -> int:
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
    state = get_state(request)
    if state.api_keys.required:
        set_caller(request, state.api_keys.check(request.headers.get("authorization", "")))


def require_key_in(header: str) -> Callable[[Request], Awaitable[None]]:
    """Take the key from this header, or from the usual one."""

    async def require(request: Request) -> None:
        """Raises InvalidApiKey."""
        if key := request.headers.get(header):
            set_caller(request, get_state(request).api_keys.check(f"Bearer {key}"))
        else:
            await require_key(request)

    return require


async def require_admin_key(request: Request) -> None:
    """Raises InvalidApiKey, AdminRequired."""
    set_caller(request, get_state(request).api_keys.check_admin(request.headers.get("authorization", "")))


_CALLER: Final = "caller"  # in the state of a request


def set_caller(connection: HTTPConnection, caller: Caller) -> None:
    connection.scope["state"][_CALLER] = caller
    metrics.current_request_stats().account = caller.account


def caller_of(connection: HTTPConnection) -> Caller:
    return cast(Caller, connection.scope["state"].get(_CALLER, NOBODY))


def models_of(connection: HTTPConnection) -> Models:
    models, account = get_state(connection).models, caller_of(connection).account
    return models.allowed(account.models if account else None)


@contextmanager
def metered(connection: HTTPConnection) -> Iterator[None]:
    """Hold a request to its key's limits, and count it as use. Raises RateLimited."""
    metrics.current_request_stats().is_metered = True
    account = caller_of(connection).account
    with account.enter() if account else contextlib.nullcontext():
        yield
