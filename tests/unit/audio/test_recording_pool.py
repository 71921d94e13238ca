"""Slices: fair between requests, cancelled at once, never in the event loop's way."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import Cancelled, PreprocessPool, Recording
from asr_server.core import Chunk
from asr_server.errors import InvalidAudio
from tests.support.until import until
from tests.unit.audio.audio_files import end_of, make, spoken

pytestmark = pytest.mark.slow

ENOUGH_S = 60.0


@pytest.fixture
async def pool() -> AsyncIterator[PreprocessPool]:
    pool = PreprocessPool(num_workers=2)
    yield pool
    pool.shutdown()


def talk(folder: Path, name: str, minutes: float) -> Path:
    frames = np.tile(spoken(), (round(minutes * 60 * 16_000 / len(spoken())), 1))
    return make(folder, name, frames, 16_000)


def hours_of_mp3(folder: Path, hours: float) -> Path:
    """Copies of one minute: frames of MP3 may be joined, where no header counts them."""
    minute = talk(folder, "untagged.mp3", 1.0).read_bytes()
    path = folder / "long.mp3"
    path.write_bytes(minute * round(hours * 60))
    return path


async def finish(pool: PreprocessPool, recording: Recording) -> list[Chunk]:
    chunks: list[Chunk] = []
    finished = False
    while not finished:
        more, finished = await pool.decode_slice(recording)
        chunks += more
    return chunks


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.m4a"])
async def test_many_files_at_once_are_read_whole(pool: PreprocessPool, tmp_path: Path, name: str) -> None:
    path = talk(tmp_path, name, 0.8)
    recordings = [Recording(path, AudioLimits()) for _ in range(12)]
    results = await asyncio.gather(*(finish(pool, recording) for recording in recordings))
    lengths = {end_of(chunks) for chunks in results}
    assert lengths == {round(recordings[0].duration_s * 16_000)}
    await until(lambda: pool.stats.busy == 0)
    assert pool.stats.queued == 0
    assert pool.stats.chunk_bytes > 0
    assert pool.held_bytes == 0


async def test_slices_go_round_between_requests(tmp_path: Path) -> None:
    pool = PreprocessPool(num_workers=1)
    path = talk(tmp_path, "a.flac", 3.0)
    order: list[int] = []

    async def read(number: int) -> None:
        recording = Recording(path, AudioLimits())
        while not (await pool.decode_slice(recording)).finished:
            order.append(number)

    await asyncio.gather(*(read(number) for number in range(3)))
    pool.shutdown()
    assert order[:9] == [0, 1, 2] * 3


async def test_a_short_file_behind_two_long_ones_waits_for_the_slices_under_way_alone(
    pool: PreprocessPool, tmp_path: Path
) -> None:
    long_path, short_path = hours_of_mp3(tmp_path, 2.0), talk(tmp_path, "a.webm", 0.2)
    await finish(pool, Recording(short_path, AudioLimits()))  # the libraries are loaded
    long_tasks = [asyncio.create_task(finish(pool, Recording(long_path, AudioLimits()))) for _ in range(2)]
    await until(lambda: pool.stats.slices >= 2)
    num_finished = pool.stats.finished
    began_after = pool.run(lambda: pool.stats.finished)
    with Recording(short_path, AudioLimits()) as recording:
        behind, _ = await asyncio.gather(began_after, pool.decode_slice(recording))
    assert behind - num_finished <= 2
    assert not any(task.done() for task in long_tasks)
    for task in long_tasks:
        task.cancel()
    await asyncio.gather(*long_tasks, return_exceptions=True)


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.m4a"])
async def test_cancelling_frees_the_thread_long_before_the_file_ends(
    pool: PreprocessPool, tmp_path: Path, name: str
) -> None:
    # Minutes of silence make a slice without a chunk: the longest there is.
    path = make(tmp_path, name, np.zeros((300 * 8_000, 1), np.float32), 8_000)
    recordings = [Recording(path, AudioLimits()) for _ in range(2)]
    tasks = [asyncio.create_task(finish(pool, recording)) for recording in recordings]
    await until(lambda: pool.stats.busy == 2 or all(task.done() for task in tasks))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: pool.stats.busy == 0)
    assert pool.held_bytes == 0


async def test_a_slice_cancelled_in_the_queue_gives_its_place_back(tmp_path: Path) -> None:
    pool = PreprocessPool(num_workers=1)
    gate = threading.Event()
    blocker = asyncio.create_task(pool.run(gate.wait, ENOUGH_S))
    await until(lambda: pool.stats.busy == 1)
    path = talk(tmp_path, "a.wav", 0.1)
    recordings = [Recording(path, AudioLimits()) for _ in range(5)]
    waiting = [asyncio.create_task(pool.decode_slice(recording)) for recording in recordings]
    await until(lambda: pool.stats.queued == 5)
    for task in waiting[:4]:
        task.cancel()
    await asyncio.gather(*waiting[:4], return_exceptions=True)
    gate.set()
    await blocker
    assert (await waiting[4]).chunks
    await until(lambda: pool.stats.busy == pool.stats.queued == 0)
    assert pool.stats.cancelled == 4
    pool.shutdown()


async def test_other_work_shares_the_threads_and_its_errors_arrive(pool: PreprocessPool) -> None:
    assert await pool.run(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)


async def test_shutdown_ends_what_runs(tmp_path: Path) -> None:
    pool = PreprocessPool(num_workers=2)
    pool.warm_up()
    tasks = [
        asyncio.create_task(finish(pool, Recording(hours_of_mp3(tmp_path, 1.0), AudioLimits())))
        for _ in range(4)
    ]
    await until(lambda: pool.stats.slices >= 1)
    pool.shutdown()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    ended = (Cancelled, InvalidAudio, asyncio.CancelledError, RuntimeError)
    assert all(isinstance(result, ended) for result in results)
