import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from asr_server.config import Settings
from asr_server.core import (
    ChunkId,
    ChunkResult,
    Credit,
    DecodingOptions,
    Failed,
    LanguageDetected,
    SetLanguage,
)
from asr_server.errors import ChunkFailed, EngineUnavailable
from asr_server.workers import supervisor
from asr_server.workers.dispatcher import MAX_ATTEMPTS, Dispatcher, Ticket
from tests.workers.scripted import ScriptedExecutor, ScriptedReplica, chunk, result

OPTIONS = DecodingOptions(language="en")


async def until(condition: Callable[[], object]) -> None:
    """Lets the event loop turn until the condition holds; the test's own limit bounds it."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


class House:
    def __init__(self, credit: int = 1, replicas: int = 1) -> None:
        self.executor = ScriptedExecutor(credit)
        self.dispatcher = Dispatcher(Settings(replicas=replicas, chunks_ahead=2), self.executor)

    async def open(self) -> "House":
        await self.dispatcher.start()
        await until(lambda: len(self.dispatcher.links) and all(link.ready for link in self.dispatcher.links))
        return self

    @property
    def replica(self) -> ScriptedReplica:
        return self.executor.launched[-1]

    def send(self, ticket: Ticket, index: int, duration_s: float = 30.0) -> asyncio.Task[ChunkResult]:
        return asyncio.create_task(ticket.submit(chunk(index, duration_s), OPTIONS))


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = await House().open()
    yield house
    await house.dispatcher.stop()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.0)


async def test_a_chunk_comes_back_with_its_result(house: House) -> None:
    task = house.send(house.dispatcher.open("a"), 4)
    await until(lambda: house.replica.submitted)
    house.replica.answer(ChunkId("a", 4))
    assert await task == result(4)


async def test_no_more_is_sent_than_credit_allows(house: House) -> None:
    ticket = house.dispatcher.open("a")
    tasks = [house.send(ticket, index) for index in range(3)]
    await until(lambda: house.dispatcher.num_chunks == 3)
    assert house.replica.submitted == [ChunkId("a", 0)]
    house.replica.say(Credit(1))
    await until(lambda: len(house.replica.submitted) == 2)
    ticket.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_may_not_decode_ahead_of_what_is_taken(house: House) -> None:
    ticket = house.dispatcher.open("a")
    assert await ticket.room() == house.dispatcher.chunks_ahead
    tasks = [house.send(ticket, index) for index in range(3)]
    await until(lambda: ticket.num_waiting == 2)
    room = asyncio.create_task(ticket.room())
    await asyncio.sleep(0)
    assert not room.done()
    house.replica.say(Credit(1))
    assert await room == 1
    ticket.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def served_in_order(house: House, count: int) -> list[ChunkId]:
    for index in range(count):
        await until(lambda: len(house.replica.submitted) > index)
        house.replica.answer(house.replica.submitted[index])
    return house.replica.submitted


async def test_a_short_request_passes_a_long_one_that_came_before(house: House) -> None:
    long, short = house.dispatcher.open("long"), house.dispatcher.open("short")
    tasks = [house.send(long, index) for index in range(6)]
    await until(lambda: house.dispatcher.num_chunks == 6)
    tasks.append(house.send(short, 0, duration_s=5.0))
    order = await served_in_order(house, 7)
    assert order.index(ChunkId("short", 0)) == 1  # right behind the one already taken
    await asyncio.gather(*tasks)


async def test_equal_requests_take_turns(house: House) -> None:
    first, second = house.dispatcher.open("first"), house.dispatcher.open("second")
    tasks = [house.send(ticket, index) for ticket in (first, second) for index in range(4)]
    order = await served_in_order(house, 8)
    assert [id.request_id for id in order][1:-1] == ["first", "second"] * 3
    await asyncio.gather(*tasks)


async def test_no_request_holds_more_than_half_of_the_slots(house: House) -> None:
    house.replica.say(Credit(7, num_slots=6))
    long, short = house.dispatcher.open("long"), house.dispatcher.open("short")
    tasks = [house.send(long, index) for index in range(5)]
    await until(lambda: len(house.replica.submitted) == 3)
    tasks.append(house.send(short, 0, duration_s=5.0))
    await until(lambda: ChunkId("short", 0) in house.replica.submitted)
    assert house.replica.submitted[:3] == [ChunkId("long", index) for index in range(3)]
    for index in range(5):
        await until(lambda: ChunkId("long", index) in house.replica.submitted)
        house.replica.answer(ChunkId("long", index))
    house.replica.answer(ChunkId("short", 0))
    await asyncio.gather(*tasks)


async def test_a_long_request_does_not_starve_behind_an_endless_row_of_short_ones(house: House) -> None:
    blocker = house.send(house.dispatcher.open("blocker"), 0)
    await until(lambda: house.replica.submitted)
    long = house.send(house.dispatcher.open("long"), 0)
    shorts = []
    for index in range(6):
        shorts.append(house.send(house.dispatcher.open(f"short {index}"), 0, duration_s=1.0))
        await until(lambda: house.dispatcher.num_chunks == 3)
        house.replica.answer(house.replica.submitted[-1])
        await until(lambda: len(house.replica.submitted) == index + 2)
        if long.done() or house.replica.submitted[-1].request_id == "long":
            break
    assert "long" in [id.request_id for id in house.replica.submitted]
    for task in (blocker, long, *shorts):
        task.cancel()
    await asyncio.gather(blocker, long, *shorts, return_exceptions=True)


async def test_cancelling_drops_what_waits_and_tells_the_replica_of_what_runs(house: House) -> None:
    ticket = house.dispatcher.open("a")
    tasks = [house.send(ticket, index) for index in range(3)]
    await until(lambda: house.dispatcher.num_chunks == 3)
    ticket.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in results)
    assert house.replica.cancelled == ["a"]
    assert house.dispatcher.num_chunks == 0


async def test_a_late_answer_to_a_cancelled_chunk_is_dropped(house: House) -> None:
    ticket = house.dispatcher.open("a")
    task = house.send(ticket, 0)
    await until(lambda: house.replica.submitted)
    ticket.cancel()
    house.replica.answer(ChunkId("a", 0))
    other = house.send(house.dispatcher.open("b"), 1)
    await until(lambda: ChunkId("b", 1) in house.replica.submitted)
    house.replica.answer(ChunkId("b", 1))
    assert await other == result(1)
    assert task.cancelled()


async def test_a_failed_chunk_raises_for_its_request_alone(house: House) -> None:
    task = house.send(house.dispatcher.open("a"), 0)
    await until(lambda: house.replica.submitted)
    house.replica.say(Failed(ChunkId("a", 0), "out of memory"))
    house.replica.say(Credit(1))
    with pytest.raises(ChunkFailed, match="out of memory"):
        await task
    assert house.dispatcher.ready


async def test_the_language_is_asked_for_and_sent_back(house: House) -> None:
    ticket = house.dispatcher.open("a")
    heard: list[dict[str, float]] = []

    def choose(probabilities: dict[str, float]) -> str:
        heard.append(probabilities)
        return "de"

    task = asyncio.create_task(ticket.submit(chunk(0), DecodingOptions(), on_language=choose))
    await until(lambda: house.replica.submitted)
    house.replica.say(LanguageDetected(ChunkId("a", 0), {"en": 0.4, "de": 0.6}))
    await until(lambda: SetLanguage(ChunkId("a", 0), "de") in house.replica.commands)
    house.replica.answer(ChunkId("a", 0))
    await task
    assert heard == [{"en": 0.4, "de": 0.6}]


async def test_a_dead_replica_is_replaced_and_its_chunks_are_sent_again(house: House) -> None:
    task = house.send(house.dispatcher.open("a"), 0)
    first = house.replica
    await until(lambda: first.submitted)
    first.die()
    await until(lambda: house.replica is not first and house.replica.submitted)
    assert house.replica.submitted == [ChunkId("a", 0, 0, attempt=1)]
    house.replica.answer(ChunkId("a", 0, 0, attempt=1))
    assert await task == result(0)


async def test_an_answer_of_an_earlier_attempt_is_dropped(house: House) -> None:
    task = house.send(house.dispatcher.open("a"), 0)
    first = house.replica
    await until(lambda: first.submitted)
    first.die()
    await until(lambda: house.replica is not first and house.replica.submitted)
    house.replica.answer(ChunkId("a", 0, 0, attempt=0), credit=0)
    house.replica.say(Failed(ChunkId("a", 0, 0, attempt=1), "the later word counts"))
    with pytest.raises(ChunkFailed, match="the later word counts"):
        await task


async def test_a_chunk_that_kills_every_replica_is_given_up_and_the_server_lives(house: House) -> None:
    task = house.send(house.dispatcher.open("a"), 0)
    for attempt in range(MAX_ATTEMPTS):
        await until(lambda: ChunkId("a", 0, 0, attempt) in house.replica.submitted)
        house.replica.die()
    with pytest.raises(ChunkFailed, match="died"):
        await task
    await until(lambda: house.dispatcher.ready)


async def test_replicas_that_never_start_are_given_up_for_good() -> None:
    house = House(credit=0)
    await house.dispatcher.start()
    task = house.send(house.dispatcher.open("a"), 0)
    for start in range(supervisor.MAX_FAILED_STARTS):
        await until(lambda: len(house.executor.launched) == start + 1)
        house.replica.die()
    with pytest.raises(EngineUnavailable):
        await task
    assert house.dispatcher.given_up
    assert not house.dispatcher.ready
    with pytest.raises(EngineUnavailable):
        await house.send(house.dispatcher.open("b"), 0)
    await house.dispatcher.stop()


async def test_work_is_spread_by_credit_over_replicas() -> None:
    house = await House(credit=2, replicas=2).open()
    ticket = house.dispatcher.open("a")
    tasks = [house.send(ticket, index) for index in range(4)]
    await until(lambda: all(len(replica.submitted) == 2 for replica in house.executor.launched))
    await house.dispatcher.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
