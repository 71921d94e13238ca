"""The bounded thread pool that decodes recordings, slice by slice.

Slices of all recordings share one queue, so a long file cannot hold a thread. Belongs to the event loop,
which it never blocks. Knows no HTTP and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakSet

from asr_server import metrics
from asr_server.audio.ffmpeg_client import decode_processes
from asr_server.audio.recording import DecodeSlice, Recording
from asr_server.core import Chunk

T = TypeVar("T")
QUEUED_PER_WORKER = 16


@dataclass
class PreprocessStats:
    queued: int = 0  # now
    busy: int = 0  # now
    slices: int = 0  # decoded
    finished: int = 0  # slices and any other work
    cancelled: int = 0
    chunk_bytes: int = 0  # handed on


class PreprocessPool:
    def __init__(self, num_workers: int, max_queued: int | None = None) -> None:
        self.num_workers = num_workers
        self.stats = PreprocessStats()
        self._lock = threading.Lock()
        self._recordings: WeakSet[Recording] = WeakSet()
        numbers = itertools.count()
        self._executor = ThreadPoolExecutor(num_workers, initializer=lambda: _name_thread(next(numbers)))
        if max_queued is None:
            max_queued = num_workers * QUEUED_PER_WORKER
        self._places = asyncio.Semaphore(num_workers + max_queued)

    @property
    def held_bytes(self) -> int:
        """Return the decoded bytes not yet in a chunk, about one window a recording."""
        return sum(recording.held_bytes for recording in self._recordings)

    def warm_up(self) -> None:
        decode_processes.start()

    async def decode_slice(self, recording: Recording, max_chunks: int = 1) -> DecodeSlice:
        """Decode a slice of at most `max_chunks` in a thread. Cancelled, it closes the recording."""
        self._recordings.add(recording)
        before_s = recording.duration_s
        try:
            decoded = await self.run(recording.next_slice, max_chunks)
        except asyncio.CancelledError:
            self._count(cancelled=1)
            recording.close()
            raise
        metrics.audio_received_seconds.inc(recording.duration_s - before_s)
        chunks = [piece for piece in decoded.pieces if isinstance(piece, Chunk)]
        self._count(slices=1, chunk_bytes=sum(chunk.samples.nbytes for chunk in chunks))
        return decoded

    async def run(self, function: Callable[..., T], *args: object) -> T:
        queued_at = time.monotonic()
        self._count(queued=1)
        try:
            await self._places.acquire()
        except BaseException:
            self._count(queued=-1)
            raise
        work = partial(self._work, queued_at, function, args)
        task: Future[T] = self._executor.submit(contextvars.copy_context().run, work)
        task.add_done_callback(partial(self._on_done, asyncio.get_running_loop()))
        return await asyncio.wrap_future(task)

    def _work(self, queued_at: float, function: Callable[..., T], args: tuple[object, ...]) -> T:
        started_at = time.monotonic()
        self._count(queued=-1, busy=1)
        try:
            return function(*args)
        finally:
            self._count(busy=-1, finished=1)
            metrics.on_preprocessed(queued_at, started_at)

    def _on_done(self, loop: asyncio.AbstractEventLoop, task: Future[T]) -> None:
        if task.cancelled():  # it never began
            self._count(queued=-1)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._places.release)

    def shutdown(self) -> None:
        for recording in self._recordings:
            recording.close()
        self._executor.shutdown(cancel_futures=True)

    def _count(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                setattr(self.stats, name, getattr(self.stats, name) + change)


def _name_thread(number: int) -> None:
    threading.current_thread().name = f"asr-preprocess-{number}"
