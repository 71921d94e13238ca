"""Keys share the engine first, then the requests of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asr_server.api.keys import Key
from asr_server.api.limits import Account
from asr_server.checkpoint.files import AudioWindow
from asr_server.core import ChunkId, ChunkResult
from asr_server.dispatch.key_queue import KeyQueue
from asr_server.dispatch.queue import RequestHandle
from tests.dispatch.scripted import RunningDispatcher, until
from tests.dispatch.test_queue_order import pending, request


@pytest.fixture
async def app() -> AsyncIterator[RunningDispatcher]:
    app = await RunningDispatcher().open()
    yield app
    await app.dispatcher.stop()


def open_for(app: RunningDispatcher, key: str, name: str, is_live: bool = False) -> RequestHandle:
    handle = app.dispatcher.open(name, is_live)
    handle.stats.account = Account(Key(key, "")) if key else None
    return handle


async def served_in_order(app: RunningDispatcher, count: int, num_before: int = 0) -> list[str]:
    for index in range(num_before, num_before + count):
        await until(lambda: len(app.replica.submitted) > index)
        app.replica.answer(app.replica.submitted[index])
    return [id.request_id for id in app.replica.submitted[num_before:]]


def send_all(app: RunningDispatcher, key: str, count: int) -> list[asyncio.Task[ChunkResult]]:
    """Requests of one chunk, named by key and number."""
    return [app.send(open_for(app, key, f"{key or 'nobody'} {number}"), 0) for number in range(count)]


def keys_of(order: list[str]) -> list[str]:
    return [name.partition(" ")[0] for name in order]


async def test_one_key_with_256_requests_holds_up_no_other_key(app: RunningDispatcher) -> None:
    tasks = send_all(app, "web", 256)
    await until(lambda: app.dispatcher.num_chunks == 256)
    tasks.append(app.send(open_for(app, "shop", "shop"), 0))
    order = await served_in_order(app, 257)
    assert order.index("shop") == 1  # right behind the one already taken
    await asyncio.gather(*tasks)


async def test_keys_take_turns_however_many_requests_each_has(app: RunningDispatcher) -> None:
    tasks = send_all(app, "web", 6)
    shop = open_for(app, "shop", "shop")
    tasks += [app.send(shop, index) for index in range(4)]
    order = await served_in_order(app, 10)
    assert keys_of(order)[1:8] == ["shop", "web"] * 3 + ["shop"]
    await asyncio.gather(*tasks)


async def test_requests_without_a_key_count_as_one_key(app: RunningDispatcher) -> None:
    tasks = send_all(app, "", 6) + send_all(app, "web", 3)
    order = await served_in_order(app, 9)
    assert keys_of(order)[1:7] == ["web", "nobody"] * 3
    await asyncio.gather(*tasks)


async def test_within_a_key_a_short_request_passes_a_long_one(app: RunningDispatcher) -> None:
    long, short = open_for(app, "web", "long"), open_for(app, "web", "short")
    tasks = [app.send(long, index) for index in range(6)]
    await until(lambda: app.dispatcher.num_chunks == 6)
    tasks.append(app.send(short, 0, duration_s=5.0))
    order = await served_in_order(app, 7)
    assert order.index("short") == 1
    await asyncio.gather(*tasks)


async def test_a_key_that_was_idle_has_saved_nothing_up(app: RunningDispatcher) -> None:
    busy = open_for(app, "web", "web")
    first = [app.send(busy, index) for index in range(5)]
    await served_in_order(app, 5)
    await asyncio.gather(*first)
    tasks = [app.send(busy, index) for index in range(5, 9)]
    tasks += send_all(app, "shop", 4)
    order = await served_in_order(app, 8, num_before=5)
    assert keys_of(order)[1:7] == ["shop", "web"] * 3
    await asyncio.gather(*tasks)


async def test_before_a_stop_the_oldest_request_of_any_key_goes_first(app: RunningDispatcher) -> None:
    tasks = send_all(app, "web", 3) + send_all(app, "shop", 2)
    await until(lambda: app.dispatcher.num_chunks == 5)
    app.dispatcher.drain()
    tasks.append(app.send(open_for(app, "shop", "live", is_live=True), 0))
    order = await served_in_order(app, 6)
    assert order == ["web 0", "live", "web 1", "web 2", "shop 0", "shop 1"]
    await asyncio.gather(*tasks)


async def test_a_request_that_is_cancelled_leaves_its_keys_queue(app: RunningDispatcher) -> None:
    blocker = app.send(open_for(app, "web", "blocker"), 0)
    leaves, stays = open_for(app, "web", "leaves"), open_for(app, "web", "stays")
    tasks = [app.send(leaves, 0), app.send(stays, 0)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    leaves.cancel()
    await served_in_order(app, 2)
    await asyncio.gather(blocker, *tasks, return_exceptions=True)
    assert ChunkId("leaves", 0) not in app.replica.submitted


async def test_chunks_of_a_request_that_leaves_are_sent_to_nobody(app: RunningDispatcher) -> None:
    first, leaves, stays = (
        open_for(app, key, name) for key, name in (("web", "a"), ("web", "b"), ("shop", "c"))
    )
    tasks = [app.send(handle, index) for handle in (first, leaves, stays) for index in range(2)]
    await until(lambda: app.dispatcher.num_chunks == 6)
    leaves.cancel()
    assert app.dispatcher.num_chunks == 4
    assert await served_in_order(app, 4) == ["a", "c", "a", "c"]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(app.replica.submitted) == 4


async def test_a_queue_without_a_dispatcher_keeps_no_chunk_that_it_was_told_to_drop() -> None:
    """A dispatcher would pass over those whose answer nobody waits for."""
    queue = KeyQueue(AudioWindow(1500))
    handles = [request("a"), request("b")]

    def push_both() -> None:
        for handle in handles:
            chunk = pending(handle)
            queue.set_finish_tag(chunk)
            queue.push(chunk)

    push_both()
    queue.remove(handles[0])
    assert [chunk.request for chunk in iter(lambda: queue.pop(9), None)] == [handles[1]]
    push_both()
    queue.clear()
    assert queue.pop(9) is None
    for in_order in (False, True):
        if in_order:
            queue.serve_in_order()
        handles[0].num_in_flight = 1
        push_both()
        found = [chunk.request for chunk in iter(lambda: queue.pop(1), None)]
        assert found == (handles if in_order else handles[1:])
        queue.release(handles[0])
        handles[0].num_in_flight = 0
        assert [chunk.request for chunk in iter(lambda: queue.pop(1), None)] == (
            [] if in_order else handles[:1]
        )
