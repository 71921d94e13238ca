from __future__ import annotations

import asyncio

import pytest

from asr_server.api.places import Places


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
    assert fill(places, "web") == 48
    assert fill(places, "shop") == 12
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


async def test_who_leaves_before_a_place_becomes_free_leaves_it_to_the_next() -> None:
    places = Places(1)
    places.take("")
    waiting = asyncio.create_task(places.acquire(""))
    await asyncio.sleep(0)
    waiting.cancel()
    places.release("")  # before it has left the line
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (places.num_free, places.are_taken("")) == (1, False)


async def test_who_leaves_the_line_takes_no_place_even_in_the_moment_that_it_is_given() -> None:
    places = Places(1)
    places.take("")
    waiting = [asyncio.create_task(places.acquire("")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    places.release("")  # given to the second
    waiting[1].cancel()  # which leaves before it knows
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    assert places.num_free == 0
    places.release("")
    assert not places.are_taken("")


async def test_who_leaves_the_line_leaves_nothing_in_it() -> None:
    places = Places(1)
    await places.acquire("")
    assert (places.num_free, places.num_held("")) == (0, 1)
    waiting = [asyncio.create_task(places.acquire("")) for _ in range(2)]
    await asyncio.sleep(0)
    for num_left, task in ((1, waiting[0]), (0, waiting[1])):
        task.cancel()
        await asyncio.wait([task])
        assert sum(map(len, places._waiting.values())) == len(places._waiting) == num_left
    places.release("")
    assert (places.num_free, places.are_taken("")) == (1, False)
