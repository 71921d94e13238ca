"""Places for requests and realtime sessions: who gets one, who waits, and when those refused shall return."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asr_server.api.state import SERVICE_RESTART, AdmissionLimiter, AppState, Places, RealtimeSessions
from asr_server.errors import Overloaded, SessionsTaken
from tests.support.until import until
from tests.unit.api.running_app import RunningApp


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def hold(limiter: AdmissionLimiter, release: asyncio.Event, key: str = "") -> None:
    with limiter.enter(key):
        async with limiter.acquire(key):
            await release.wait()


@asynccontextmanager
async def holding(limiter: AdmissionLimiter, count: int, key: str = "") -> AsyncIterator[None]:
    release, end_count = asyncio.Event(), limiter.num_open + count
    tasks = [asyncio.create_task(hold(limiter, release, key)) for _ in range(count)]
    await until(lambda: limiter.num_in_flight + limiter.num_waiting >= end_count)
    yield
    release.set()
    await asyncio.gather(*tasks)


def wait_s(limiter: AdmissionLimiter) -> float:
    """Return the wait that a refused client is asked for."""
    with pytest.raises(Overloaded, match="max-concurrent-requests") as caught, limiter.enter():
        pass
    return caught.value.retry_after_s


async def test_a_line_as_long_as_the_places_is_served_and_beyond_it_requests_are_refused() -> None:
    limiter = AdmissionLimiter(4)
    async with holding(limiter, 8):
        assert (limiter.num_in_flight, limiter.num_waiting, limiter.num_open) == (4, 4, 8)
        wait_s(limiter)
        with pytest.raises(Overloaded):  # its upload had begun before the line was full
            await limiter.acquire().__aenter__()
        assert limiter.num_rejected == 2
    assert (limiter.num_in_flight, limiter.num_waiting, limiter.num_open) == (0, 0, 0)


async def test_a_place_is_free_again_whatever_happened_in_it() -> None:
    limiter = AdmissionLimiter(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with limiter.acquire():
                _ = limiter.num_in_flight / (limiter.num_in_flight - 1)
    assert limiter.num_in_flight == 0


async def test_a_refused_client_is_asked_to_wait_while_the_line_is_served() -> None:
    clock = Clock()
    limiter = AdmissionLimiter(2, clock)
    for _ in range(100):
        async with limiter.acquire():
            clock.now_s += 3.0
    async with holding(limiter, 4):
        assert wait_s(limiter) == pytest.approx(6.0, rel=0.01)


async def test_refused_clients_that_gave_up_lengthen_nobodys_wait() -> None:
    clock = Clock()
    limiter = AdmissionLimiter(1, clock)
    async with holding(limiter, 2):
        first_s = wait_s(limiter)
        for _ in range(1000):
            wait_s(limiter)
        clock.now_s += 3600.0
        assert wait_s(limiter) == first_s


async def test_a_client_that_leaves_the_line_makes_room_in_it() -> None:
    limiter = AdmissionLimiter(1)
    async with holding(limiter, 1):
        for _ in range(2):
            waiting = asyncio.create_task(hold(limiter, asyncio.Event()))
            await until(lambda: limiter.num_waiting)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert limiter.num_waiting == 0


async def test_a_key_that_has_its_share_is_refused_and_others_are_not() -> None:
    limiter = AdmissionLimiter(8, is_shared=True)
    async with holding(limiter, 12, "web"):
        assert (limiter.num_in_flight, limiter.num_waiting) == (6, 6)
        with pytest.raises(Overloaded, match="This key's share of the 8 places"), limiter.enter("web"):
            pass
        async with holding(limiter, 1, "shop"):
            assert limiter.num_in_flight == 7


# -- Places --


def fill(places: Places, key: str) -> int:
    """Return how many the key gets until it would wait."""
    count = 0
    while not places.are_taken(key):
        places.take(key)
        count += 1
    return count


def test_places_that_are_not_shared_go_to_whoever_comes_first() -> None:
    places = Places(256)
    assert (fill(places, "web"), fill(places, "shop")) == (256, 0)


def test_a_key_alone_gets_three_quarters_and_those_behind_it_three_quarters_of_the_rest() -> None:
    places = Places(256, is_shared=True)
    assert [fill(places, key) for key in ("web", "shop", "news")] == [192, 48, 12]


@pytest.mark.parametrize("num_places", range(1, 9))
def test_few_places_are_used_too(num_places: int) -> None:
    places = Places(num_places, is_shared=True)
    assert fill(places, "web") >= max(1, num_places // 2)


def test_keys_that_want_all_come_to_equal_shares() -> None:
    places, keys = Places(64, is_shared=True), ("web", "shop")
    assert (fill(places, "web"), fill(places, "shop")) == (48, 12)
    for _ in range(100):
        for key in keys:
            places.release(key)
        for key in keys:
            fill(places, key)
    shares = [places.num_held(key) for key in keys]
    assert max(shares) - min(shares) <= 4
    assert sum(shares) + places.num_free == 64


async def test_a_free_place_goes_to_the_waiting_key_that_holds_fewest() -> None:
    places, order = Places(4, is_shared=True), list[str]()
    for key in ("web", "web", "web", "shop"):
        places.take(key)

    async def wait(key: str) -> None:
        await places.acquire(key)
        order.append(key)

    waiting = [asyncio.create_task(wait(key)) for key in ("web", "shop", "news")]
    await asyncio.sleep(0)
    for key in ("web", "web", "web"):
        places.release(key)
    await asyncio.gather(*waiting)
    assert order == ["news", "web", "shop"]


async def test_a_client_that_leaves_takes_no_place_even_in_the_moment_that_it_is_given() -> None:
    places = Places(1)
    places.take("")
    waiting = [asyncio.create_task(places.acquire("")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    places.release("")  # before the first has left the line: given to the second
    waiting[1].cancel()  # which leaves before it knows
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    places.release("")
    assert (places.num_free, places.are_taken("")) == (1, False)


class Session:
    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    def end(self, code: int, reason: str) -> None:
        self.ended.append((code, reason))


def test_sessions_are_counted_and_refused_beyond_the_limit_by_the_settings_name() -> None:
    sessions = RealtimeSessions(2)
    with sessions.enter(Session().end, "web"), sessions.enter(Session().end, "shop"):
        with pytest.raises(SessionsTaken) as caught, sessions.enter(Session().end, "news"):
            pass
        assert caught.value.message == (
            "2 realtime sessions are open: --max-realtime-sessions (ASR_SERVER_MAX_REALTIME_SESSIONS)."
        )
        assert caught.value.retry_after_s == 5
        assert (sessions.num_active, sessions.num_started, sessions.num_rejected) == (2, 2, 1)
    assert (sessions.num_active, sessions.num_started, sessions.num_turns) == (0, 2, 0)
    with sessions.enter(Session().end, "news"):
        assert (sessions.num_started, sessions.num_rejected, sessions.is_draining) == (3, 1, False)


def test_a_key_that_shares_the_places_is_refused_while_others_are_free() -> None:
    sessions = RealtimeSessions(4, is_shared=True)
    with (
        sessions.enter(Session().end, "web"),
        sessions.enter(Session().end, "web"),
        sessions.enter(Session().end, "web"),
    ):
        with pytest.raises(SessionsTaken, match="This key's share of 4 realtime sessions is open: --max"):
            sessions.require_place("web")
        sessions.require_place("shop")
        assert sessions.num_rejected == 0  # asked only


async def test_a_drain_ends_each_session_and_waits_until_they_have_left() -> None:
    sessions, session = RealtimeSessions(2), Session()
    with sessions.enter(session.end):
        draining = asyncio.create_task(sessions.drain(60))
        await asyncio.sleep(0)
        assert sessions.is_draining
        assert session.ended == [(SERVICE_RESTART, "The server is shutting down.")]
        assert SERVICE_RESTART == 1012
        with sessions.enter(Session().end):
            pass
        await asyncio.sleep(0)
        assert not draining.done()  # the other one has not left
    await asyncio.wait_for(draining, 60)


async def test_a_server_is_idle_without_requests_and_sessions(app: RunningApp) -> None:
    server: AppState = app.app.state.server
    assert server.is_idle
    with server.admission.enter():
        assert not server.is_idle
    with server.realtime.enter(Session().end):
        assert not server.is_idle
    assert server.is_idle
    assert abs(server.started_at - time.time()) < 3600
