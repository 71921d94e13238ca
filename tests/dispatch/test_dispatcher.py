import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asr_server.channel.messages import (
    Credit,
    EarlyResult,
    EngineInfo,
    Failed,
    LanguageDetected,
    SetLanguage,
)
from asr_server.config import Settings
from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import MIN_ATTEMPTS, create_executor, describe
from asr_server.dispatch.inline import InlineExecutor
from asr_server.dispatch.processes import MultiprocessExecutor
from asr_server.dispatch.ray import RayExecutor
from asr_server.dispatch.supervisor import MAX_FAILED_STARTS
from asr_server.errors import ChunkFailed, EngineUnavailable, ShuttingDown
from tests.dispatch.scripted import OPTIONS, RunningDispatcher, chunk, result, until
from tests.embedded import embedded


@pytest.fixture
async def app() -> AsyncIterator[RunningDispatcher]:
    app = await RunningDispatcher().open()
    yield app
    await app.dispatcher.stop()


async def test_a_chunk_comes_back_with_its_result(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 4)
    await until(lambda: app.replica.submitted)
    app.replica.answer(ChunkId("a", 4))
    assert await task == result(4)


async def test_a_replica_on_another_device_than_the_last_one_is_told(
    app: RunningDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the device was left to it and a GPU is lost, it would else go on on the CPU without a word."""
    reasons = {"device": "found", "dtype": "found", "num_slots": "found"}
    for device in ("cuda", "cuda", "cpu"):
        app.replica.say(Credit(1, 8, EngineInfo(device, "float32", 8, 2, reasons)))
    with caplog.at_level(logging.WARNING):
        await until(lambda: app.dispatcher.engine is not None and app.dispatcher.engine.device == "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "a replica runs on cpu; the last one ran on cuda"
    ]


def test_the_start_line_names_the_revision_or_else_the_folder(tmp_path: Path) -> None:
    info = EngineInfo("cpu", "float32", 8, 2, {"device": "found", "dtype": "found", "num_slots": "found"})
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    assert ", revision abc123: device cpu" in describe(Settings(model=str(snapshot)), info, 1)
    line = describe(Settings(model=str(tmp_path)), info, 1)
    assert f", revision of the files in {tmp_path}: device cpu" in line


def test_the_start_line_has_each_choice_with_its_setting_or_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("asr_server.dispatch.dispatcher.available_cores", lambda: 12)
    reasons = {"device": "found", "dtype": "native", "num_slots": "memory"}
    model, info = str(tmp_path), EngineInfo("cpu", "float32", 8, 2, reasons)

    def said(settings: Settings, count: int, **more: str) -> str:
        line = describe(settings, msgspec.structs.replace(info, reasons=reasons | more), count)
        return line.partition(": ")[2]

    chosen = "device cpu (found), dtype float32 (native), slots 8 (memory)"
    assert said(Settings(model=model), 1) == f"{chosen}, threads 2 (12 cores), replicas 1"
    shared = f"{chosen}, threads 2 (12 cores for 2 replicas), replicas 2 (sharing)"
    assert said(Settings(model=model), 2, num_replicas="sharing") == shared
    asked = Settings(
        model=model,
        device="cpu",
        dtype="float32",
        max_slots=8,
        cpu_threads=2,
        cache_dtype="fp8",
        encoder_dtype="fp8",
    )
    assert said(asked, 1, kernels="all") == (
        "device cpu (--device), dtype float32 (--dtype), slots 8 (--max-slots), "
        "the audio's keys and values fp8 (--cache-dtype), encoder fp8 (--encoder-dtype), "
        "threads 2 (--cpu-threads), replicas 1, kernels: all"
    )


@pytest.mark.parametrize(
    ("setting", "kind"),
    [("inline", InlineExecutor), ("multiprocess", MultiprocessExecutor), ("ray", RayExecutor)],
)
def test_a_setting_decides_where_replicas_run(setting: Any, kind: type) -> None:
    assert type(create_executor(embedded(executor=setting))) is kind


async def test_no_more_is_sent_than_credit_allows(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    assert app.replica.submitted == [ChunkId("a", 0)]
    app.replica.say(Credit(1))
    await until(lambda: len(app.replica.submitted) == 2)
    handle.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_may_not_decode_ahead_of_what_is_taken(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    assert await handle.wait_for_capacity() == app.dispatcher.chunks_ahead
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: handle.num_waiting == 2)
    room = asyncio.create_task(handle.wait_for_capacity())
    await asyncio.sleep(0)
    assert not room.done()
    app.replica.say(Credit(1))
    assert await room == 1
    handle.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def served_in_order(app: RunningDispatcher, count: int) -> list[ChunkId]:
    for index in range(count):
        await until(lambda: len(app.replica.submitted) > index)
        app.replica.answer(app.replica.submitted[index])
    return app.replica.submitted


async def test_a_short_request_passes_a_long_one_that_came_before(app: RunningDispatcher) -> None:
    long, short = app.dispatcher.open("long"), app.dispatcher.open("short")
    tasks = [app.send(long, index) for index in range(6)]
    await until(lambda: app.dispatcher.num_chunks == 6)
    tasks.append(app.send(short, 0, duration_s=5.0))
    order = await served_in_order(app, 7)
    assert order.index(ChunkId("short", 0)) == 1  # right behind the one already taken
    await asyncio.gather(*tasks)


async def test_equal_requests_take_turns(app: RunningDispatcher) -> None:
    first, second = app.dispatcher.open("first"), app.dispatcher.open("second")
    tasks = [app.send(handle, index) for handle in (first, second) for index in range(4)]
    order = await served_in_order(app, 8)
    assert [id.request_id for id in order][1:-1] == ["first", "second"] * 3
    await asyncio.gather(*tasks)


async def test_no_request_holds_more_than_three_quarters_of_the_slots(app: RunningDispatcher) -> None:
    app.replica.say(Credit(7, num_slots=4))
    long, short = app.dispatcher.open("long"), app.dispatcher.open("short")
    tasks = [app.send(long, index) for index in range(5)]
    await until(lambda: len(app.replica.submitted) == 3)
    tasks.append(app.send(short, 0, duration_s=5.0))
    await until(lambda: ChunkId("short", 0) in app.replica.submitted)
    assert app.replica.submitted[:3] == [ChunkId("long", index) for index in range(3)]
    for index in range(5):
        await until(lambda: ChunkId("long", index) in app.replica.submitted)
        app.replica.answer(ChunkId("long", index))
    app.replica.answer(ChunkId("short", 0))
    await asyncio.gather(*tasks)


async def test_a_long_request_does_not_starve_behind_a_row_of_short_ones(
    app: RunningDispatcher,
) -> None:
    blocker = app.send(app.dispatcher.open("blocker"), 0)
    await until(lambda: app.replica.submitted)
    long = app.send(app.dispatcher.open("long"), 0)
    shorts = []
    for index in range(20):  # they cost a twelfth of the long one
        shorts.append(app.send(app.dispatcher.open(f"short {index}"), 0, duration_s=2.0))
        await until(lambda: app.dispatcher.num_chunks == 3)
        app.replica.answer(app.replica.submitted[-1])
        await until(lambda: len(app.replica.submitted) == index + 2)
        if long.done() or app.replica.submitted[-1].request_id == "long":
            break
    assert "long" in [id.request_id for id in app.replica.submitted]
    for task in (blocker, long, *shorts):
        task.cancel()
    await asyncio.gather(blocker, long, *shorts, return_exceptions=True)


async def test_cancelling_drops_what_waits_and_tells_the_replica_of_what_runs(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(3)]
    await until(lambda: app.dispatcher.num_chunks == 3)
    handle.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in results)
    assert app.replica.cancelled == ["a"]
    assert app.dispatcher.num_chunks == 0


async def test_cancelling_frees_the_samples_at_once_though_no_replica_has_credit() -> None:
    app = await RunningDispatcher(credit=1).open()
    blocking = [app.send(app.dispatcher.open("blocking"), 0)]
    await until(lambda: app.replica.submitted)
    waiting = chunk(1)
    samples = weakref.ref(waiting.samples)
    handle = app.dispatcher.open("leaves")
    task = asyncio.create_task(handle.submit(waiting, OPTIONS))
    await until(lambda: app.dispatcher.num_chunks == 2)
    handle.cancel()
    await asyncio.wait([task])
    del waiting, task
    gc.collect()
    assert samples() is None
    await app.dispatcher.stop()
    await asyncio.gather(*blocking, return_exceptions=True)


async def test_a_late_answer_to_a_cancelled_chunk_is_dropped(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    task = app.send(handle, 0)
    await until(lambda: app.replica.submitted)
    handle.cancel()
    app.replica.answer(ChunkId("a", 0))
    other = app.send(app.dispatcher.open("b"), 1)
    await until(lambda: ChunkId("b", 1) in app.replica.submitted)
    app.replica.answer(ChunkId("b", 1))
    assert await other == result(1)
    assert task.cancelled()


async def test_a_failed_chunk_raises_for_its_request_alone(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    await until(lambda: app.replica.submitted)
    app.replica.say(Failed(ChunkId("a", 0), "out of memory"))
    app.replica.say(Credit(1))
    with pytest.raises(ChunkFailed, match="out of memory"):
        await task
    assert app.dispatcher.ready


async def test_the_language_is_asked_for_and_sent_back(app: RunningDispatcher) -> None:
    handle = app.dispatcher.open("a")
    heard: list[dict[str, float]] = []

    def choose(probabilities: dict[str, float]) -> str:
        heard.append(probabilities)
        return "de"

    task = asyncio.create_task(handle.submit(chunk(0), DecodingOptions(), on_language=choose))
    await until(lambda: app.replica.submitted)
    app.replica.say(LanguageDetected(ChunkId("a", 0), {"en": 0.4, "de": 0.6}))
    await until(lambda: SetLanguage(ChunkId("a", 0), "de") in app.replica.commands)
    app.replica.answer(ChunkId("a", 0))
    await task
    assert heard == [{"en": 0.4, "de": 0.6}]


async def test_early_results_reach_the_request_while_its_chunk_is_in_flight(app: RunningDispatcher) -> None:
    told: list[ChunkResult] = []
    handle = app.dispatcher.open("a")
    task = asyncio.create_task(handle.submit(chunk(0), OPTIONS, on_early_result=told.append))
    silent = app.send(handle, 1)  # which waits, and asks for none
    await until(lambda: app.replica.submitted)
    moves = handle.num_moves
    for id in (ChunkId("a", 0), ChunkId("a", 1), ChunkId("b", 0)):
        app.replica.say(EarlyResult(id, result(7)))
    await until(lambda: told)
    app.replica.say(EarlyResult(ChunkId("a", 0), result(8)))
    await until(lambda: len(told) == 2)
    assert told == [result(7), result(8)]
    assert handle.num_moves == moves + 2
    app.replica.answer(ChunkId("a", 0))
    await task
    app.replica.say(EarlyResult(ChunkId("a", 0), result(9)))
    await until(lambda: ChunkId("a", 1) in app.replica.submitted)
    app.replica.say(EarlyResult(ChunkId("a", 1), result(9)))
    app.replica.answer(ChunkId("a", 1))
    await silent
    assert len(told) == 2


async def test_a_dead_replica_is_replaced_and_its_chunks_are_sent_again(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    first = app.replica
    await until(lambda: first.submitted)
    first.die()
    await until(lambda: app.replica is not first and app.replica.submitted)
    assert app.replica.submitted == [ChunkId("a", 0, 0, attempt=1)]
    app.replica.answer(ChunkId("a", 0, 0, attempt=1))
    assert await task == result(0)


async def test_an_answer_of_an_earlier_attempt_is_dropped(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    first = app.replica
    await until(lambda: first.submitted)
    first.die()
    await until(lambda: app.replica is not first and app.replica.submitted)
    app.replica.answer(ChunkId("a", 0, 0, attempt=0), credit=0)
    app.replica.say(Failed(ChunkId("a", 0, 0, attempt=1), "the later word counts"))
    with pytest.raises(ChunkFailed, match="the later word counts"):
        await task


async def test_a_chunk_that_kills_every_replica_is_given_up(
    app: RunningDispatcher,
) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    for attempt in range(MIN_ATTEMPTS):
        await until(lambda: ChunkId("a", 0, 0, attempt) in app.replica.submitted)
        app.replica.die()
    with pytest.raises(ChunkFailed, match=f"has ended {MIN_ATTEMPTS} engine processes"):
        await task
    await until(lambda: app.dispatcher.ready)


async def test_replicas_that_never_start_are_given_up_for_good() -> None:
    app = RunningDispatcher(credit=0)
    await app.dispatcher.start()
    task = app.send(app.dispatcher.open("a"), 0)
    for start in range(MAX_FAILED_STARTS):
        await until(lambda: len(app.executor.launched) == start + 1)
        app.replica.die()
    with pytest.raises(EngineUnavailable):
        await task
    assert app.dispatcher.supervisor.given_up
    assert not app.dispatcher.ready
    with pytest.raises(EngineUnavailable):
        await app.send(app.dispatcher.open("b"), 0)
    await app.dispatcher.stop()


async def test_work_is_spread_by_credit_over_replicas() -> None:
    app = await RunningDispatcher(credit=2, replicas=2).open()
    handle = app.dispatcher.open("a")
    tasks = [app.send(handle, index) for index in range(4)]
    await until(lambda: all(len(replica.submitted) == 2 for replica in app.executor.launched))
    await app.dispatcher.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)


async def test_before_a_stop_requests_are_finished_in_the_order_in_which_they_came(
    app: RunningDispatcher,
) -> None:
    app.replica.say(Credit(1, num_slots=2))
    handles = [app.dispatcher.open(name) for name in ("first", "second", "third")]
    tasks = [app.send(handle, index) for index in range(4) for handle in handles]
    await until(lambda: app.dispatcher.num_chunks == 12)
    assert not app.dispatcher.draining
    app.dispatcher.drain()
    assert app.dispatcher.draining, "new requests are refused by this"
    order = await served_in_order(app, 12)
    rest = [id.request_id for id in order[2:]]  # two were on their way before
    assert rest == sorted(rest)
    await asyncio.gather(*tasks)


async def test_chunks_that_come_after_all_have_failed_fail_too(app: RunningDispatcher) -> None:
    waiting = [app.send(app.dispatcher.open("a"), index) for index in range(2)]
    await until(lambda: app.dispatcher.num_chunks == 2)
    app.dispatcher.fail_all(ShuttingDown)
    for task in (*waiting, app.send(app.dispatcher.open("b"), 0)):
        with pytest.raises(ShuttingDown):
            await task


async def test_while_replicas_are_ended_chunks_wait_for_the_next_start(app: RunningDispatcher) -> None:
    first = app.replica
    await app.dispatcher.end_replicas()
    assert (first.closed, app.executor.stopped, app.dispatcher.ready) == (True, True, False)
    task = app.send(app.dispatcher.open("a"), 0)
    await until(lambda: app.dispatcher.num_chunks == 1)
    await app.dispatcher.start()
    await until(lambda: app.replica is not first and app.replica.submitted)
    app.replica.answer(ChunkId("a", 0))
    assert await task == result(0)
    await app.dispatcher.stop()
    assert app.replica.closed


async def test_a_replica_that_is_lost_during_a_drain_is_replaced(app: RunningDispatcher) -> None:
    task = app.send(app.dispatcher.open("a"), 0)
    first = app.replica
    await until(lambda: first.submitted)
    app.dispatcher.drain()
    first.die()
    await until(lambda: app.replica is not first and app.replica.submitted)
    app.replica.answer(app.replica.submitted[0])
    assert await task == result(0)


async def test_a_request_that_cannot_choose_its_language_fails_alone(app: RunningDispatcher) -> None:
    def choose(probabilities: dict[str, float]) -> str:
        raise ZeroDivisionError

    handle = app.dispatcher.open("a")
    task = asyncio.create_task(handle.submit(chunk(0), DecodingOptions(), on_language=choose))
    await until(lambda: app.replica.submitted)
    app.replica.say(LanguageDetected(ChunkId("a", 0), {"en": 0.4, "de": 0.6}))
    with pytest.raises(ZeroDivisionError):
        await task
    handle.cancel()
    assert len(app.executor.launched) == 1
    assert app.replica.cancelled == ["a"]


async def test_before_a_stop_live_speech_goes_before_files(app: RunningDispatcher) -> None:
    file = app.dispatcher.open("file")
    tasks = [app.send(file, index) for index in range(4)]
    await until(lambda: app.dispatcher.num_chunks == 4)
    app.dispatcher.drain()
    tasks.append(app.send(app.dispatcher.open("turn", is_live=True), 0))
    order = await served_in_order(app, 5)
    assert order.index(ChunkId("turn", 0)) <= 2  # behind those on their way before
    await asyncio.gather(*tasks)
