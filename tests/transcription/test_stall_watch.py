"""A request in which nothing moves ends with an error; one that waits for its turn or its client goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from asr_server.api.errors import response_to
from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import Recording
from asr_server.channel.messages import Command, Event, Heartbeat
from asr_server.core import DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import RequestStalled
from asr_server.metrics import REGISTRY
from asr_server.transcription import StallLimits, Transcriber
from asr_server.transcription.progress import ChunkProgress
from asr_server.transcription.stall_watch import MAX_STEPS_IN_FLIGHT, StallWatch
from tests.embedded import embedded
from tests.fake_replica import FakeReplica, noise, say, wav
from tests.memory_file import MemoryFile
from tests.vocabulary import make_tokenizer, words

if TYPE_CHECKING:
    from asr_server.dispatch.queue import RequestHandle

ENGLISH = DecodingOptions(language="en")
IN_DOUBT = {"de": 0.4, "en": 0.3, "zh": 0.3}


class BusyReplica(FakeReplica):
    """Keeps whatever it is sent, and steps on."""

    beat_s = 0.1

    def send(self, command: Command) -> None:
        self.holding = True
        super().send(command)

    async def receive(self) -> list[Event]:
        return [
            Heartbeat(num_steps=event.num_steps * MAX_STEPS_IN_FLIGHT)
            if isinstance(event, Heartbeat)
            else event
            for event in await super().receive()
        ]


@asynccontextmanager
async def transcriber(
    replica: FakeReplica, limits: StallLimits, workers: int = 1
) -> AsyncIterator[Transcriber]:
    dispatcher, pool = Dispatcher(embedded(), replica), PreprocessPool(workers)
    await dispatcher.start()
    try:
        yield Transcriber(dispatcher, pool, make_tokenizer(), stall_limits=limits)
    finally:
        await dispatcher.stop()
        await asyncio.to_thread(pool.shutdown)


async def read(app: Transcriber, options: DecodingOptions = ENGLISH) -> str:
    async with app.run(Recording(MemoryFile(wav(noise(75)))), options) as session:
        return "".join([delta.text async for delta in session])


def num_stalled() -> float:
    return REGISTRY.get_sample_value("asr_requests_stalled_total") or 0.0


async def test_tasks_that_wait_for_each_other_end_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a stream in a doubtful language did: its first chunk waited for the votes of chunks that waited
    for its text.
    """
    monkeypatch.setattr(ChunkProgress, "on_wait_for_others", lambda self: None)
    replica = FakeReplica(lambda submit: say(*words("1")))
    replica.probabilities = IN_DOUBT
    before = num_stalled()
    async with transcriber(replica, StallLimits(request_s=0.2)) as app, asyncio.timeout(60):
        with pytest.raises(RequestStalled, match="nothing of it has moved"):
            await read(app, DecodingOptions(early_results=True, streams=True))
    assert num_stalled() == before + 1
    assert "the request is ended: nothing of it has moved" in caplog.text


@pytest.mark.slow
async def test_a_chunk_that_its_replica_never_finishes_ends_the_request() -> None:
    async with transcriber(BusyReplica(lambda submit: say()), StallLimits()) as app, asyncio.timeout(60):
        with pytest.raises(RequestStalled, match="steps without finishing"):
            await read(app)


async def test_a_pool_that_finishes_nothing_ends_the_request() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    release = threading.Event()
    async with transcriber(replica, StallLimits(request_s=0.1, pool_s=0.2)) as app, asyncio.timeout(60):
        stuck = asyncio.create_task(app.pool.run(release.wait))
        try:
            with pytest.raises(RequestStalled, match="threads that decode"):
                await read(app)
        finally:
            release.set()
            await stuck


@pytest.mark.slow
async def test_a_request_that_waits_for_its_turn_is_not_ended() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    replica.holding = True
    async with transcriber(replica, StallLimits(request_s=0.5)) as app, asyncio.timeout(60):
        running = asyncio.create_task(read(app))
        await asyncio.wait([running], timeout=2.0)
        assert not running.done()
        replica.holding = False
        for submit in replica.held:
            replica.release(submit)
        assert await running


@pytest.mark.slow
async def test_a_client_that_reads_slowly_does_not_end_its_request() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    async with (
        asyncio.timeout(60),
        transcriber(replica, StallLimits(request_s=0.5)) as app,
        app.run(Recording(MemoryFile(wav(noise(75)))), ENGLISH) as session,
    ):
        deltas = aiter(session)
        first = await anext(deltas)
        await asyncio.sleep(2.0)  # four times the limit
        assert first.text + "".join([delta.text async for delta in deltas])


def test_the_error_says_what_happened_in_openais_body() -> None:
    response = response_to(RequestStalled("It came to a standstill."))
    assert response.status_code == 500
    assert b'"code":"request_stalled"' in response.body


class Movable:
    """A request's side of the watch, moved by a test."""

    num_moves = num_waiting = num_in_flight = num_steps = 0

    def steps_in_flight(self) -> int:
        return self.num_steps


async def watched(handle: Movable, limits: StallLimits, at_each_tick: Callable[[int], None]) -> str:
    """Return what the watch says within thirty ticks, or nothing."""
    pool = PreprocessPool(1)
    watch = StallWatch(cast("RequestHandle", handle), pool, limits)
    tick_s = min(1.0, limits.request_s / 4)
    try:
        for number in range(30):
            at_each_tick(number)
            try:
                watch._on_tick(tick_s)
            except RequestStalled as error:
                return f"{number}: {error}"
        return ""
    finally:
        pool.shutdown()


@pytest.mark.parametrize(("last_move", "ended_at"), [(0, 4), (3, 7), (29, None)])
async def test_a_request_is_ended_by_four_ticks_without_a_move(last_move: int, ended_at: int | None) -> None:
    handle = Movable()

    def move(number: int) -> None:
        handle.num_moves += number <= last_move

    said = await watched(handle, StallLimits(request_s=4.0), move)
    expected = f"{ended_at}: The request came to a standstill and was ended: nothing of it has moved for 4 s."
    assert said == ("" if ended_at is None else expected)


async def test_what_waits_in_the_queue_is_not_ended_and_what_left_it_is_later() -> None:
    handle = Movable()

    def wait(number: int) -> None:
        handle.num_waiting = int(number < 20)

    assert (await watched(handle, StallLimits(request_s=4.0), wait)).startswith("23: ")


@pytest.mark.parametrize(("num_steps", "is_ended"), [(20_000, False), (20_001, True)])
async def test_a_chunk_in_flight_is_ended_by_its_steps_alone(num_steps: int, is_ended: bool) -> None:
    handle = Movable()
    handle.num_in_flight, handle.num_steps = 1, num_steps
    said = await watched(handle, StallLimits(request_s=4.0), lambda _: None)
    assert (f"taken {num_steps} steps" in said) == is_ended


def test_the_limits_are_the_settings() -> None:
    limits = StallLimits.from_settings(embedded(max_stall_s=7, max_preprocess_s=100))
    assert limits == StallLimits(request_s=7, pool_s=107)


def test_the_limits_are_the_settings_own_where_nothing_is_set() -> None:
    assert StallLimits() == StallLimits.from_settings(embedded()) == StallLimits(60.0, 660.0)


@pytest.mark.parametrize(("is_waiting", "ended_at"), [(False, 4), (True, 17)])
async def test_what_threads_finish_counts_only_for_a_request_that_waits_for_them(
    is_waiting: bool, ended_at: int
) -> None:
    pool: Any = SimpleNamespace(stats=SimpleNamespace(finished=0))
    watch = StallWatch(cast("RequestHandle", Movable()), pool, StallLimits(request_s=4.0, pool_s=8.0))
    with watch.waiting_for_pool() if is_waiting else nullcontext():
        for _ in range(ended_at):
            pool.stats.finished = min(10, pool.stats.finished + 1)
            watch._on_tick(1.0)
        with pytest.raises(RequestStalled):
            watch._on_tick(1.0)


@pytest.mark.parametrize(("request_s", "tick_s"), [(60.0, 1.0), (4.0, 1.0), (2.0, 0.5)])
async def test_a_watch_ticks_each_second_and_at_least_four_times_in_its_limit(
    request_s: float, tick_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_s: list[float] = []
    monkeypatch.setattr(
        asyncio.get_running_loop(), "call_later", lambda delay_s, begin: after_s.append(delay_s)
    )
    pool: Any = None
    watch = StallWatch(cast("RequestHandle", Movable()), pool, StallLimits(request_s=request_s))
    watch.start(cast("asyncio.TaskGroup", None), [])
    assert after_s == [tick_s]


async def test_a_stopped_watch_ends_nothing() -> None:
    pool: Any = None
    watch = StallWatch(cast("RequestHandle", Movable()), pool, StallLimits(request_s=0.004))
    never = asyncio.create_task(asyncio.Event().wait())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        watch.start(group, [never])
        while isinstance(watch._watching, asyncio.TimerHandle):
            await asyncio.sleep(0)
        watch.stop()
    never.cancel()
