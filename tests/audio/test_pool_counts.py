"""What a pool says that it has done, and how many pieces of work may wait for its threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from asr_server.audio.ffmpeg_client import decode_processes
from asr_server.audio.pool import PreprocessPool, PreprocessStats
from asr_server.audio.recording import Cancelled, Recording
from asr_server.core import Chunk
from asr_server.metrics import REGISTRY
from tests.api.running_app import until
from tests.fake_replica import noise, wav
from tests.memory_file import MemoryFile


@pytest.fixture
def pool() -> Iterator[PreprocessPool]:
    pool = PreprocessPool(num_workers=1, max_queued=1)
    yield pool
    pool.shutdown()


def received_s() -> float:
    return REGISTRY.get_sample_value("asr_audio_received_seconds_total") or 0.0


async def test_a_slice_counts_with_its_chunks_and_the_audio_that_was_read(pool: PreprocessPool) -> None:
    before_s, recording = received_s(), Recording(MemoryFile(wav(noise(75.0))))
    first = await pool.decode_slice(recording)
    chunks = [piece for piece in first.pieces if isinstance(piece, Chunk)]
    assert len(chunks) == 1
    assert pool.stats == PreprocessStats(slices=1, finished=1, chunk_bytes=4 * len(chunks[0].samples))
    assert received_s() - before_s == pytest.approx(recording.duration_s)
    assert pool.held_bytes == recording.held_bytes > 0
    last = await pool.decode_slice(recording, max_chunks=9)
    assert last.finished
    assert (pool.stats.slices, pool.stats.chunk_bytes) == (2, 4 * 75 * 16_000)
    assert received_s() - before_s == pytest.approx(75.0)
    assert pool.held_bytes == 0


async def test_so_much_work_waits_in_the_pool_and_the_rest_before_it(pool: PreprocessPool) -> None:
    may_end, begun = threading.Event(), list[int]()

    def work(number: int) -> int:
        begun.append(number)
        may_end.wait(60)
        return number

    tasks = [asyncio.create_task(pool.run(work, number)) for number in range(4)]
    await until(lambda: pool.stats == PreprocessStats(busy=1, queued=3))
    assert begun == [0]
    tasks[3].cancel()  # it waits for a place
    await asyncio.gather(tasks[3], return_exceptions=True)
    assert pool.stats == PreprocessStats(busy=1, queued=2)
    tasks[1].cancel()  # it has one
    await until(lambda: pool.stats == PreprocessStats(busy=1, queued=1))
    may_end.set()
    assert [await tasks[0], await tasks[2]] == [0, 2]
    assert begun == [0, 2]
    assert pool.stats == PreprocessStats(finished=2)


async def test_a_slice_that_is_cancelled_closes_its_recording(pool: PreprocessPool) -> None:
    may_end = threading.Event()
    blocker = asyncio.create_task(pool.run(may_end.wait, 60))
    await until(lambda: pool.stats.busy == 1)
    recording = Recording(MemoryFile(wav(noise(2.0))))
    slice_ = asyncio.create_task(pool.decode_slice(recording))
    await until(lambda: pool.stats.queued == 1)
    slice_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slice_
    assert (pool.stats.cancelled, pool.stats.slices) == (1, 0)
    with pytest.raises(Cancelled):
        recording.next_slice()
    may_end.set()
    await blocker


async def test_a_shutdown_closes_what_is_half_read_and_begins_nothing_more(pool: PreprocessPool) -> None:
    recording = Recording(MemoryFile(wav(noise(75.0))))
    await pool.decode_slice(recording)
    pool.shutdown()
    with pytest.raises(Cancelled):
        recording.next_slice()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await pool.run(print)


async def test_a_pool_starts_the_processes_that_decode_and_names_its_threads(
    pool: PreprocessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(decode_processes, "start", lambda: started.append(True))
    pool.warm_up()
    assert started == [True]
    assert await pool.run(lambda: threading.current_thread().name) == "asr-preprocess-0"


async def test_sixteen_pieces_of_work_wait_for_each_thread() -> None:
    pool, may_end = PreprocessPool(num_workers=2), threading.Event()
    try:
        tasks = [asyncio.create_task(pool.run(may_end.wait, 60)) for _ in range(36)]
        await until(lambda: pool.stats == PreprocessStats(busy=2, queued=34))
        for task in tasks[-2:]:
            task.cancel()
        await asyncio.gather(*tasks[-2:], return_exceptions=True)
        assert pool.stats == PreprocessStats(busy=2, queued=32)
        assert pool._executor._work_queue.qsize() == 32
        may_end.set()
        assert all(await asyncio.gather(*tasks[:-2]))
    finally:
        may_end.set()
        pool.shutdown()
