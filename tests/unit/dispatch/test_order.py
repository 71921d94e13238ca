"""The order in which chunks are sent: fair between keys first, then between the requests of each."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_server.annexes.keys.accounts import Account, Key
from asr_server.core import AudioWindow, ChunkId, ChunkResult
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import ChunkQueue, PendingChunk, RequestHandle
from asr_server.transport.messages import Cancel, Credit, Submit
from tests.support.embedded import embedded
from tests.unit.dispatch.scripted import OPTIONS, RunningDispatcher, chunk, until


@pytest.fixture
async def app() -> AsyncIterator[RunningDispatcher]:
    app = await RunningDispatcher().open()
    yield app
    await app.dispatcher.stop()


def open_for(app: RunningDispatcher, key: str, name: str, is_live: bool = False) -> RequestHandle:
    handle = app.dispatcher.open(name, is_live)
    handle.stats.account = Account(Key(key, "")) if key else None
    return handle


async def served(app: RunningDispatcher, count: int, num_before: int = 0) -> list[str]:
    for index in range(num_before, num_before + count):
        await until(lambda: len(app.replica.submitted) > index)
        app.replica.answer(app.replica.submitted[index])
    return [id.handle_id for id in app.replica.submitted[num_before:]]


def send_all(app: RunningDispatcher, key: str, count: int) -> list[asyncio.Task[ChunkResult]]:
    """Requests of one chunk, named by key and number."""
    return [app.send(open_for(app, key, f"{key or 'nobody'} {number}"), 0) for number in range(count)]


def keys_of(order: list[str]) -> list[str]:
    return [name.partition(" ")[0] for name in order]


@pytest.mark.parametrize("key", ["", "web"])
async def test_a_short_request_passes_a_long_one_that_came_before(app: RunningDispatcher, key: str) -> None:
    long, short = open_for(app, key, "long"), open_for(app, key, "short")
    tasks = [app.send(long, index) for index in range(6)]
    await until(lambda: app.dispatcher.num_chunks == 6)
    tasks.append(app.send(short, 0, duration_s=5.0))
    order = await served(app, 7)
    assert order.index("short") == 1  # right behind the one already taken
    await asyncio.gather(*tasks)


async def test_equal_requests_take_turns(app: RunningDispatcher) -> None:
    first, second = app.dispatcher.open("first"), app.dispatcher.open("second")
    tasks = [app.send(handle, index) for handle in (first, second) for index in range(4)]
    assert (await served(app, 8))[1:-1] == ["first", "second"] * 3
    await asyncio.gather(*tasks)


async def test_a_long_request_does_not_starve_behind_a_row_of_short_ones(app: RunningDispatcher) -> None:
    blocker = app.send(app.dispatcher.open("blocker"), 0)
    await until(lambda: app.replica.submitted)
    tasks = [blocker, app.send(app.dispatcher.open("long"), 0)]
    for index in range(20):  # they cost a twelfth of the long one
        tasks.append(app.send(app.dispatcher.open(f"short {index}"), 0, duration_s=2.0))
        await until(lambda: app.dispatcher.num_chunks == 3)
        app.replica.answer(app.replica.submitted[-1])
        await until(lambda: len(app.replica.submitted) == index + 2)
        if app.replica.submitted[-1].handle_id == "long":
            break
    assert "long" in [id.handle_id for id in app.replica.submitted]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_alone_gets_all_slots_and_no_more() -> None:
    """Two replicas of one slot: one file uses both. The credit beyond is for the next request."""
    app = await RunningDispatcher(credit=2, replicas=2).open()
    for replica in app.executor.launched:
        replica.say(Credit(0, num_slots=1))
    await until(lambda: app.dispatcher.num_slots == 2)
    long = app.dispatcher.open("long")
    tasks = [app.send(long, index) for index in range(5)]
    await until(lambda: app.dispatcher.num_chunks == 5)
    assert [len(replica.submitted) for replica in app.executor.launched] == [1, 1]
    tasks.append(app.send(app.dispatcher.open("short"), 0))
    await until(lambda: sum(len(replica.submitted) for replica in app.executor.launched) == 3)
    app.executor.launched[0].say(Credit(0, num_slots=3))  # as if another one had joined
    await until(lambda: long.num_in_flight == 3)
    long.cancel()
    await app.dispatcher.stop()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_keys_take_turns_however_many_requests_each_has(app: RunningDispatcher) -> None:
    tasks = send_all(app, "web", 6)
    shop = open_for(app, "shop", "shop")
    tasks += [app.send(shop, index) for index in range(4)]
    assert keys_of(await served(app, 10))[1:8] == ["shop", "web"] * 3 + ["shop"]
    await asyncio.gather(*tasks)


async def test_requests_without_a_key_count_as_one_key(app: RunningDispatcher) -> None:
    tasks = send_all(app, "", 6) + send_all(app, "web", 3)
    assert keys_of(await served(app, 9))[1:7] == ["web", "nobody"] * 3
    await asyncio.gather(*tasks)


async def test_a_key_that_was_idle_has_saved_nothing_up(app: RunningDispatcher) -> None:
    busy = open_for(app, "web", "web")
    first = [app.send(busy, index) for index in range(5)]
    await served(app, 5)
    await asyncio.gather(*first)
    tasks = [app.send(busy, index) for index in range(5, 9)]
    tasks += send_all(app, "shop", 4)
    assert keys_of(await served(app, 8, num_before=5))[1:7] == ["shop", "web"] * 3
    await asyncio.gather(*tasks)


async def test_the_background_gets_a_sixteenth_beside_others_or_all_alone(app: RunningDispatcher) -> None:
    job = open_for(app, "", "job")
    job.is_background = True
    tasks = [app.send(job, index) for index in range(6)]
    tasks += send_all(app, "", 32)
    others = ["nobody"] * 16
    assert keys_of(await served(app, 38)) == ["job", *others, "job", *others, *["job"] * 4]
    await asyncio.gather(*tasks)


async def test_beside_others_a_sixteenth_of_what_a_replica_has_is_of_the_background() -> None:
    app = await RunningDispatcher(credit=100).open()
    app.replica.say(Credit(0, num_slots=32))
    others = send_all(app, "", 32)
    await until(lambda: len(app.replica.submitted) == 32)
    job = open_for(app, "", "job")
    job.is_background = True
    tasks = [app.send(job, index) for index in range(6)]
    await until(lambda: app.dispatcher.num_chunks == 38)
    assert keys_of([id.handle_id for id in app.replica.submitted[32:]]) == ["job"] * 2
    for id in app.replica.submitted[:32]:
        app.replica.answer(id)
    await until(lambda: len(app.replica.submitted) == 38)
    for id in app.replica.submitted[32:]:
        app.replica.answer(id)
    await asyncio.gather(*others, *tasks)
    await app.dispatcher.stop()


async def test_who_waits_gets_the_slots_of_the_background_which_is_done_again_later() -> None:
    app = await RunningDispatcher(credit=6).open()
    app.replica.say(Credit(0, num_slots=4))
    await until(lambda: app.dispatcher.num_slots == 4)
    jobs = [open_for(app, "", f"job {number}") for number in range(6)]
    tasks = []
    for number, job in enumerate(jobs):
        job.is_background = True
        tasks.append(app.send(job, number))
        await until(lambda: len(app.replica.submitted) == number + 1)
    tasks += send_all(app, "", 2)
    await until(lambda: app.dispatcher.num_waiting == 6)
    withdrawn = {command.id for command in app.replica.commands if isinstance(command, Cancel)}
    assert len(withdrawn) == 4
    app.replica.say(Credit(4))
    await until(lambda: len(app.replica.submitted) == 8)
    assert keys_of([id.handle_id for id in app.replica.submitted[6:]]) == ["nobody"] * 2
    for id in [id for id in app.replica.submitted if id not in withdrawn]:
        app.replica.answer(id)
    await until(lambda: len(app.replica.submitted) == 12)
    assert set(app.replica.submitted[8:]) == withdrawn
    for number in range(8, 12):
        app.replica.answer(app.replica.submitted[number])
    await asyncio.gather(*tasks)
    await app.dispatcher.stop()


async def test_before_a_stop_the_background_goes_last(app: RunningDispatcher) -> None:
    job = open_for(app, "", "job")
    job.is_background = True
    tasks = [app.send(job, index) for index in range(3)] + send_all(app, "web", 3)
    await until(lambda: app.dispatcher.num_chunks == 6)
    app.dispatcher.drain()
    assert (await served(app, 6))[1:] == ["web 0", "web 1", "web 2", "job", "job"]
    await asyncio.gather(*tasks)


async def test_before_a_stop_live_speech_goes_first_then_the_oldest_request(app: RunningDispatcher) -> None:
    """However many slots one request takes for it."""
    app.replica.say(Credit(0, num_slots=1))
    tasks = send_all(app, "web", 3) + send_all(app, "shop", 2)
    await until(lambda: app.dispatcher.num_chunks == 5)
    app.dispatcher.drain()
    tasks.append(app.send(open_for(app, "shop", "live", is_live=True), 0))
    assert await served(app, 6) == ["web 0", "live", "web 1", "web 2", "shop 0", "shop 1"]
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("window", "encoded"), [(AudioWindow(400), 275 / 400), (AudioWindow(1500), 900 / 1500)]
)
async def test_a_chunk_costs_its_share_of_the_window(window: AudioWindow, encoded: float) -> None:
    """Half a window and 1.5 s, rounded up to half a second, or between 6 and 20 s to two."""
    app = await RunningDispatcher(credit=2, window=window).open()
    request = app.dispatcher.open("one full chunk, one half full")
    tasks = [app.send(request, i, window.duration_s * share) for i, share in enumerate((1.0, 0.5))]
    await until(lambda: len(app.replica.submitted) == 2)
    assert request.last_finish_tag == pytest.approx(1 + encoded + 1.5)
    request.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await app.dispatcher.stop()


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(0, 5), st.floats(0.1, 30.0)),
            st.tuples(st.sampled_from(["pop", "end", "cancel"]), st.integers(0, 5), st.just(0.0)),
            st.tuples(st.just("drain"), st.just(0), st.just(0.0)),
        ),
        max_size=60,
    )
)
def test_every_chunk_leaves_once_in_its_requests_order_within_the_limit_unless_cancelled(
    steps: list[tuple[str, int, float]],
) -> None:
    asyncio.run(live(steps))


async def live(steps: list[tuple[str, int, float]]) -> None:
    dispatcher, queue, limit, drains = Dispatcher(embedded()), ChunkQueue(AudioWindow(1500)), 2, False
    requests = [dispatcher.open(str(number), is_live=number == 5) for number in range(6)]
    for number, request in enumerate(requests):
        request.stats.account = Account(Key("key", "")) if number % 2 else None
    pushed, waiting = Counter[str](), {request.handle_id: list[int]() for request in requests}

    def pop() -> None:
        found = queue.pop(limit)
        can_leave = [each for each in requests if waiting[each.handle_id]]
        if not drains:
            can_leave = [each for each in can_leave if each.num_in_flight < limit]
        if found is None:
            assert not can_leave
            return
        assert found.request in can_leave
        if drains:
            assert found.request is min(can_leave, key=lambda each: (not each.is_live, each.number))
        assert found.submit.id.chunk == waiting[found.request.handle_id].pop(0)
        found.request.num_in_flight += 1

    for action, number, duration_s in steps:
        request = requests[number]
        match action:
            case "push":
                index = pushed[request.handle_id]
                pushed[request.handle_id] += 1
                waiting[request.handle_id].append(index)
                submit = Submit(ChunkId(request.handle_id, index), chunk(index, duration_s).samples, OPTIONS)
                pending = PendingChunk(submit, request)
                queue.set_finish_tag(pending)
                queue.push(pending)
            case "pop":
                pop()
            case "end":
                request.num_in_flight = max(0, request.num_in_flight - 1)
            case "cancel":
                queue.remove(request)
                waiting[request.handle_id].clear()
            case "drain":
                drains = True
                queue.serve_in_order()
    for request in requests:
        request.num_in_flight = 0
    limit = 10**6
    for _ in range(sum(map(len, waiting.values()))):
        pop()
    assert not any(waiting.values())
    assert queue.pop(limit) is None
