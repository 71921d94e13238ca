"""Speed with more threads, beside processes that share nothing, and the event loop's delay meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop

from asr_server.audio.limits import AudioLimits
from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import Recording
from asr_server.config import Settings

from .ways import by_whole_file, ours

T = TypeVar("T")
THREADS = (1, 2, 4, 8, 16)
PROCESSES = (1, 2)
MEASURE_S = 1.0  # by one thread; as long again by two with twice the files


async def with_threads(path: Path, num_threads: int, num_files: int) -> tuple[int, float]:
    """How many files were read, and the wall-clock seconds. Two files are open for each thread, one after
    another and in step, so that all threads end together.
    """
    pool = PreprocessPool(num_threads)
    pool.warm_up()
    num_readers = 2 * num_threads
    files_each = max(1, num_files // num_readers)

    async def read() -> None:
        for _ in range(files_each):
            with Recording(path, AudioLimits()) as recording:
                while not (await pool.decode_slice(recording, Settings.chunks_ahead)).finished:
                    pass

    await asyncio.gather(*(pool.run(ours, path) for _ in range(num_threads)))  # everything is loaded
    start = time.perf_counter()
    await asyncio.gather(*(read() for _ in range(num_readers)))
    elapsed_s = time.perf_counter() - start
    await asyncio.to_thread(pool.shutdown)
    return num_readers * files_each, elapsed_s


async def speed(path: Path, num_threads: int, num_files: int, duration_s: float) -> float:
    """RTFx. Nothing else runs: whoever measures delays takes processor time when all cores are busy."""
    num_read, elapsed_s = await with_threads(path, num_threads, num_files)
    return num_read * duration_s / elapsed_s


async def loop_delays(work: Awaitable[Any]) -> list[float]:
    """In milliseconds, while the work goes on."""
    task = asyncio.ensure_future(work)
    delays = []
    while not task.done():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        delays.append((time.perf_counter() - start) * 1000 - 1)
    await task
    return delays


async def our_delays(path: Path, num_files: int) -> list[float]:
    return await loop_delays(with_threads(path, 2, num_files))


async def rival_delays(path: Path, num_files: int) -> list[float]:
    """The same with the whole-file way in a thread pool."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        return await loop_delays(
            asyncio.gather(*(loop.run_in_executor(pool, by_whole_file, path) for _ in range(num_files)))
        )


def threads(paths: dict[str, Path], rounds: int, duration_s: float, tick: Callable[[], None]) -> Any:
    """format -> "threads" and "processes" -> number -> RTFx, "delay_p99_ms" -> way; a figure a round."""
    results: dict[str, Any] = {name: _empty_entry() for name in paths}
    for _ in range(rounds):
        for name, path in paths.items():
            entry, num_files = results[name], _files_for(path, MEASURE_S)
            for number in THREADS:
                work = speed(path, number, min(number, os.cpu_count() or 1) * num_files, duration_s)
                entry["threads"][str(number)].append(_run(work))
                tick()
            for number in PROCESSES:
                entry["processes"][str(number)].append(by_processes(path, number, num_files, duration_s))
                tick()
            for way, delays in (("ours", our_delays), ("whole file", rival_delays)):
                values = _run(delays(path, max(4, num_files if way == "ours" else 0)))
                entry["delay_p99_ms"][way].append(float(np.percentile(values, 99)))
                tick()
    return results


def _empty_entry() -> dict[str, dict[str, list[float]]]:
    return {
        "threads": {str(number): [] for number in THREADS},
        "processes": {str(number): [] for number in PROCESSES},
        "delay_p99_ms": {"ours": [], "whole file": []},
    }


def _run(work: Coroutine[Any, Any, T]) -> T:
    """In the event loop that the server has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _files_for(path: Path, seconds: float) -> int:
    """How many files keep one thread busy for so long: a short measurement would be of its own start."""
    ours(path)
    start = time.perf_counter()
    ours(path)
    return max(2, round(seconds / (time.perf_counter() - start)))


def _read_in_process(path: Path, num_files: int, connection: Any) -> None:
    ours(path)
    connection.send("ready")
    connection.recv()
    for _ in range(num_files):
        ours(path)
    connection.send("done")


def by_processes(path: Path, num_processes: int, num_files: int, duration_s: float) -> float:
    """RTFx of processes that share nothing but the machine: what its cores and caches can give."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_processes)]
    processes = [
        context.Process(target=_read_in_process, args=(path, num_files, there)) for _, there in pipes
    ]
    for process in processes:
        process.start()
    for here, _ in pipes:
        here.recv()
    start = time.perf_counter()
    for here, _ in pipes:
        here.send("go")
    for here, _ in pipes:
        here.recv()
    elapsed_s = time.perf_counter() - start
    for process in processes:
        process.join()
    return num_processes * num_files * duration_s / elapsed_s
