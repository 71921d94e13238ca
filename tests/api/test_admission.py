from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from asr_server.api.admission import TURN_LASTS_S, AdmissionLimiter, Pace
from asr_server.api.errors import MAX_WAIT_S, MIN_WAIT_S
from asr_server.errors import Overloaded
from tests.api.running_app import until


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def fill(limiter: AdmissionLimiter, num_places: int) -> AsyncExitStack:
    taken = AsyncExitStack()
    for _ in range(num_places):
        await taken.enter_async_context(limiter.acquire())
    return taken


def wait_s(limiter: AdmissionLimiter) -> float:
    """Return the wait that a refused client is asked for."""
    with pytest.raises(Overloaded, match="max-concurrent-requests") as caught, limiter.enter():
        pass
    return caught.value.retry_after_s


async def hold(limiter: AdmissionLimiter, release: asyncio.Event) -> None:
    with limiter.enter():
        await asyncio.sleep(0)  # the upload
        async with limiter.acquire():
            await release.wait()


async def test_a_place_is_free_again_whatever_happened_in_it() -> None:
    limiter = AdmissionLimiter(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with limiter.acquire():
                _ = limiter.num_in_flight / (limiter.num_in_flight - 1)
    assert limiter.num_in_flight == 0


async def test_requests_without_a_place_are_refused_before_their_upload_and_wait_in_line_after_it() -> None:
    limiter, release = AdmissionLimiter(1), asyncio.Event()
    inside = [asyncio.create_task(hold(limiter, release)) for _ in range(2)]
    await until(lambda: limiter.num_open == 2)
    assert limiter.num_in_flight == 1
    assert wait_s(limiter) >= MIN_WAIT_S
    with pytest.raises(Overloaded, match="max-concurrent-requests"):  # the line is full
        await limiter.acquire().__aenter__()
    assert limiter.num_rejected == 2
    release.set()
    await asyncio.gather(*inside)
    assert (limiter.num_in_flight, limiter.num_open) == (0, 0)


async def test_refused_clients_get_turns_one_after_another_within_what_official_clients_obey() -> None:
    limiter = AdmissionLimiter(4, Clock())
    async with await fill(limiter, 4):
        turns_s = [wait_s(limiter) for _ in range(2000)]
    assert turns_s[0] == MIN_WAIT_S
    assert turns_s == sorted(turns_s)
    assert len(set(turns_s)) > 900
    assert turns_s[-1] == MAX_WAIT_S


async def test_turns_come_as_fast_as_places_became_free(clock: Clock) -> None:
    limiter = AdmissionLimiter(2, clock)
    async with limiter.acquire():
        for _ in range(50):
            async with limiter.acquire():
                clock.now_s += 3.0
        async with limiter.acquire():
            assert [wait_s(limiter) for _ in range(3)] == pytest.approx([3.0, 6.0, 9.0], rel=0.01)


async def test_times_with_few_requests_say_nothing_about_the_pace(clock: Clock) -> None:
    limiter = AdmissionLimiter(16, clock)
    for _ in range(50):
        async with limiter.acquire():
            clock.now_s += 10.0
    async with await fill(limiter, 16):
        assert wait_s(limiter) == MIN_WAIT_S


async def test_time_in_which_nobody_came_says_nothing_about_the_pace(clock: Clock) -> None:
    limiter = AdmissionLimiter(2, clock)
    for _ in range(50):
        clock.now_s += 100.0
        async with limiter.acquire():
            clock.now_s += 3.0
    async with await fill(limiter, 2):
        assert wait_s(limiter) == pytest.approx(3.0, rel=0.01)


async def test_requests_slower_than_any_before_lengthen_the_wait_before_they_end(clock: Clock) -> None:
    limiter = AdmissionLimiter(1, clock)
    async with await fill(limiter, 1):
        clock.now_s = 30.0
        assert wait_s(limiter) > 20.0


async def test_a_client_that_returns_at_its_turn_waits_for_a_place_and_is_not_refused_again(
    clock: Clock,
) -> None:
    limiter, release = AdmissionLimiter(1, clock), asyncio.Event()
    async with await fill(limiter, 1):
        clock.now_s += wait_s(limiter)
        returned = asyncio.create_task(hold(limiter, release))
        await until(lambda: limiter.num_open)
        wait_s(limiter)  # the line is full
        assert limiter.num_in_flight == 1
    await until(lambda: limiter.num_in_flight == 1)
    assert not returned.done()
    release.set()
    await returned
    assert limiter.num_in_flight == 0


async def test_a_client_that_says_it_is_new_takes_nobodys_turn(clock: Clock) -> None:
    limiter, release = AdmissionLimiter(1, clock), asyncio.Event()
    async with await fill(limiter, 1):
        clock.now_s += wait_s(limiter)
        with pytest.raises(Overloaded), limiter.enter(is_first_try=True):
            pass
        returned = asyncio.create_task(hold(limiter, release))
        await until(lambda: limiter.num_open)
    release.set()
    await returned


async def test_a_client_that_leaves_the_line_makes_room_in_it(clock: Clock) -> None:
    limiter = AdmissionLimiter(1, clock)
    async with await fill(limiter, 1):
        for _ in range(2):
            clock.now_s += wait_s(limiter)
            returned = asyncio.create_task(hold(limiter, asyncio.Event()))
            await until(lambda: limiter.num_open)
            returned.cancel()
            await asyncio.gather(returned, return_exceptions=True)
    assert (limiter.num_in_flight, limiter.num_open) == (0, 0)
    async with limiter.acquire():
        pass


async def test_a_turn_that_nobody_takes_ends(clock: Clock) -> None:
    limiter = AdmissionLimiter(1, clock)
    async with await fill(limiter, 1):
        clock.now_s += wait_s(limiter) + TURN_LASTS_S + 1
        assert wait_s(limiter)


async def test_a_burst_of_300_on_256_places_needs_no_third_try_however_slow_the_machine(clock: Clock) -> None:
    """The first place becomes free after a minute."""
    limiter, release = AdmissionLimiter(256, clock), asyncio.Event()
    inside = await fill(limiter, 256)
    for turn_s in sorted(wait_s(limiter) for _ in range(44)):
        clock.now_s = turn_s
        asyncio.create_task(hold(limiter, release))  # noqa: RUF006
    await until(lambda: limiter.num_open == 44)
    clock.now_s = 60.0
    release.set()
    await inside.aclose()
    await until(lambda: limiter.num_open == 0)
    assert limiter.num_rejected == 44


# -- By the second --


def pace(num_places: int, clock: Clock) -> Pace:
    made = Pace(num_places, clock)
    clock.now_s += 100  # at rest, which says nothing
    assert made.interval_s(0) == pytest.approx(0.05)
    return made


@pytest.mark.parametrize(("num_places", "guesses"), [(1, 1), (16, 1), (32, 2), (256, 16)])
def test_a_guess_weighs_as_much_as_a_sixteenth_of_the_places(
    num_places: int, guesses: int, clock: Clock
) -> None:
    measured = pace(num_places, clock)
    measured.before_taking(num_places)
    clock.now_s += 1
    assert measured.interval_s(num_places) == pytest.approx((0.05 * guesses + 1) / guesses)


@pytest.mark.parametrize(("num_taken", "interval_s"), [(7, 0.05), (8, 1.05), (16, 1.05)])
def test_time_counts_while_half_of_the_places_are_taken(
    num_taken: int, interval_s: float, clock: Clock
) -> None:
    measured = pace(16, clock)
    clock.now_s += 1
    measured.before_taking(num_taken)
    assert measured.interval_s(0) == pytest.approx(interval_s)


def test_a_place_that_became_free_counts_while_half_were_taken(clock: Clock) -> None:
    measured = pace(16, clock)
    clock.now_s += 1
    measured.before_freeing(8)
    assert measured.interval_s(0) == pytest.approx(1.05 / 2)
    measured.before_freeing(7)
    assert measured.interval_s(0) == pytest.approx(1.05 / 2)


def test_the_latest_places_count_most(clock: Clock) -> None:
    measured = pace(2, clock)
    for _ in range(2):  # with the guess these are three, more than there are places
        clock.now_s += 1
        measured.before_freeing(2)
    assert measured.interval_s(0) == pytest.approx(2.05 / 3)
    clock.now_s += 3
    measured.before_freeing(2)
    assert measured.interval_s(0) == pytest.approx((2.05 / 2 + 3) / 2.5)


@pytest.mark.parametrize(("num_places", "length"), [(1, 1), (4, 1), (8, 2), (256, 64)])
async def test_the_line_is_a_quarter_as_long_as_there_are_places(num_places: int, length: int) -> None:
    limiter = AdmissionLimiter(num_places)
    assert (limiter.num_places, limiter.num_waiting, limiter.num_rejected) == (num_places, 0, 0)
    taken = await fill(limiter, num_places)
    release = asyncio.Event()
    waiting = [asyncio.create_task(acquire(limiter, release)) for _ in range(length)]
    await asyncio.sleep(0)
    assert (limiter.num_in_flight, limiter.num_waiting) == (num_places, length)
    with pytest.raises(Overloaded, match=f"{num_places} requests are in flight already"):
        await acquire(limiter, release)
    assert limiter.num_rejected == 1
    await taken.aclose()
    release.set()
    await asyncio.gather(*waiting)
    assert (limiter.num_in_flight, limiter.num_waiting) == (0, 0)


async def acquire(limiter: AdmissionLimiter, release: asyncio.Event) -> None:
    async with limiter.acquire():
        await release.wait()


async def test_a_key_is_refused_its_share_by_name_and_others_have_theirs() -> None:
    limiter = AdmissionLimiter(8, is_shared=True)
    release = asyncio.Event()
    holding = [asyncio.create_task(acquire_for(limiter, "web", release)) for _ in range(6)]
    await asyncio.sleep(0)
    assert limiter.num_in_flight == 6
    with pytest.raises(Overloaded, match="This key's share of 8 requests"), limiter.enter(key="web"):
        pass
    with limiter.enter(key="shop"):
        assert limiter.num_open == 1
    assert limiter.num_open == 0
    release.set()
    await asyncio.gather(*holding)


async def acquire_for(limiter: AdmissionLimiter, key: str, release: asyncio.Event) -> None:
    async with limiter.acquire(key):
        await release.wait()


@pytest.mark.parametrize(
    ("later_s", "is_first_try", "may_enter"),
    [
        (-0.01, False, False),
        (0.0, False, True),
        (30.0, False, True),
        (30.1, False, False),
        (0.0, True, False),
    ],
)
async def test_a_turn_holds_from_its_time_on_for_half_a_minute(
    later_s: float, is_first_try: bool, may_enter: bool, clock: Clock
) -> None:
    limiter = AdmissionLimiter(4, clock)
    taken = await fill(limiter, 4)
    assert wait_s(limiter) == MIN_WAIT_S
    clock.now_s += MIN_WAIT_S + later_s
    if may_enter:
        with limiter.enter(is_first_try):
            assert limiter.num_open == 1
        with pytest.raises(Overloaded), limiter.enter(is_first_try):  # a turn is for one
            pass
    else:
        with pytest.raises(Overloaded), limiter.enter(is_first_try):
            pass
    await taken.aclose()


async def test_a_full_line_gives_no_turn(clock: Clock) -> None:
    limiter = AdmissionLimiter(4, clock)
    taken = await fill(limiter, 4)
    release = asyncio.Event()
    waiting = asyncio.create_task(acquire(limiter, release))
    await asyncio.sleep(0)
    assert wait_s(limiter) == MIN_WAIT_S
    clock.now_s += MIN_WAIT_S
    with pytest.raises(Overloaded), limiter.enter():
        pass
    await taken.aclose()
    release.set()
    await waiting


async def test_turns_lie_behind_the_line_and_each_other_up_to_the_longest_wait(clock: Clock) -> None:
    limiter = AdmissionLimiter(16, clock)
    taken = await fill(limiter, 16)
    release = asyncio.Event()
    waiting = [asyncio.create_task(acquire(limiter, release)) for _ in range(2)]
    await asyncio.sleep(0)
    clock.now_s += 9.95  # so that a place becomes free every 10 s
    assert [wait_s(limiter) for _ in range(3)] == pytest.approx([30.0, 40.0, MAX_WAIT_S])
    assert wait_s(limiter) == MAX_WAIT_S
    assert limiter.num_rejected == 4
    await taken.aclose()
    release.set()
    await asyncio.gather(*waiting)
