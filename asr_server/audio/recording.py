"""Decode recordings into chunks, slice by slice, in a bounded pool of threads.

A slice decodes until a chunk is ready. Slices of all recordings share one queue, so a long file cannot hold a
thread, and the event loop never waits. Decoders read a file descriptor without calling Python. Split channels
come from one pass, each cut at its own quiet points. Knows no HTTP and no model.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar
from weakref import WeakSet

import msgspec

from asr_server import metrics
from asr_server.audio.decoder import (
    DEFAULT_TRACK,
    MIN_AUDIO_S,
    TOO_MANY_FILES,
    AudioLimits,
    CannotOpen,
    DecodeTask,
    TrackChoice,
    id3_size,
    invalid_audio,
    ranked,
)
from asr_server.audio.ffmpeg_client import RemoteStream, decode_processes
from asr_server.audio.split import Splitter
from asr_server.audio.stream import ClippedStream, DecodedStream, Stream
from asr_server.audio.wav import WavDecoder
from asr_server.core import SAMPLE_RATE, Chunk, Clip, Samples, Track
from asr_server.errors import AudioTooShort, DecodingUnavailable

Source = Path | BinaryIO  # a file that is open is one of the system's, and stays its owner's


def open_source(source: Source) -> io.FileIO:
    """Open the same file with its own position, even if it is unlinked. Raises OSError."""
    if isinstance(source, Path):
        return io.FileIO(source)
    if source.writable():
        source.flush()
    try:
        return io.FileIO(f"/proc/self/fd/{source.fileno()}")
    except OSError:
        return io.FileIO(os.dup(source.fileno()))


def memory_file() -> BinaryIO:
    """Return a nameless file, in memory if possible."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("asr-upload", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def open_wav(fd: int) -> WavDecoder | None:
    """Return the decoder of this process for WAV, or None for FFmpeg. Names and types are not trusted."""
    head = os.pread(fd, 10, 0)
    if not head:
        raise invalid_audio("The file is empty.")
    try:
        return WavDecoder(fd, id3_size(head))
    except CannotOpen:
        return None


MAX_SLICE_S = 0.2  # a slice without a chunk (a long silence, a slow codec) gives its thread back after this
# Handing a thread over costs up to half a millisecond, as much as a chunk of 16 kHz mono WAV.
FILLED_SLICE_S = 0.01

logger = logging.getLogger(__name__)


class DecodeSlice(NamedTuple):
    chunks: list[Chunk]
    finished: bool


class Cancelled(Exception):
    pass


class Recording:
    """A resumable decoder: one slice at a time, each in any thread.

    `close` may be called from anywhere and never waits.
    """

    def __init__(
        self,
        source: Source,
        limits: AudioLimits | None = None,
        split_channels: bool = False,
        listener: Callable[[Samples], None] | None = None,
        choice: TrackChoice = DEFAULT_TRACK,
        channel: int | None = None,
        clips: Sequence[Clip] = (),
    ) -> None:
        self.truncated = False
        self.work_s = 0.0
        self.expected_duration_s: float | None = None  # by the file's header, once the first slice is decoded
        # Of the file, once the first slice is decoded; tracks only if it has several.
        self.num_channels, self.tracks_read = 1, tuple[Track, ...]()
        self._source, self._clips = source, clips
        self._task = DecodeTask(limits or AudioLimits(), split_channels, choice, channel)
        self._file: io.FileIO | None = None
        self._stream: Stream | None = None
        self.listener = listener  # gets all samples, in order
        most = self._task.limits.chunk_samples
        self._splitters = [Splitter(most) for _ in range(2 if split_channels else 1)]
        self._numbers = itertools.count()  # of chunks, whatever their channel
        self._finished = False
        self._closed = threading.Event()
        self._inside = threading.Lock()

    @property
    def duration_s(self) -> float:
        """Return the seconds decoded so far, finally the exact length."""
        return self._splitters[0].num_samples / SAMPLE_RATE

    @property
    def settled_s(self) -> float:
        return min(splitter.num_settled for splitter in self._splitters) / SAMPLE_RATE

    @property
    def held_bytes(self) -> int:
        return sum(splitter.held_bytes for splitter in self._splitters)

    def of_channel(self, channel: int) -> Recording:
        task = self._task
        return Recording(self._source, task.limits, choice=task.choice, channel=channel, clips=self._clips)

    def next_slice(self, max_chunks: int = 1) -> DecodeSlice:
        """Decode until a chunk is ready, up to `max_chunks` if they come fast; the first leaves at once.

        Raises InvalidAudio, AudioTooShort or AudioTooLong, and Cancelled after `close`.
        """
        try:
            with self._inside:
                decoded = self._decode_slice(max_chunks)
        except BaseException:
            self.close()
            raise
        if decoded.finished or self._closed.is_set():
            self.close()
        return decoded

    def close(self) -> None:
        self._closed.set()
        if self._inside.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._inside.release()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode_slice(self, max_chunks: int) -> DecodeSlice:
        chunks: list[Chunk] = []
        started_at, started_work_at_s = time.monotonic(), time.thread_time()
        spent_s = worked_s = 0.0
        if not any(splitter.num_chunks for splitter in self._splitters):
            max_chunks = 1
        while not self._finished and len(chunks) < max_chunks:
            if spent_s > (FILLED_SLICE_S if chunks else MAX_SLICE_S):
                break
            if self._closed.is_set():
                raise Cancelled
            chunks += self._step()
            spent_s = time.monotonic() - started_at
            worked_s = time.thread_time() - started_work_at_s  # a busy machine makes no file more work
            self._task.limits.check_work(self.work_s + worked_s)
        self.work_s += worked_s
        return DecodeSlice(chunks, self._finished)

    def _step(self) -> list[Chunk]:
        if self._stream is None:
            opened = self._open()
            self._stream = ClippedStream(opened, self._clips) if self._clips else opened
        samples = self._stream.read()
        info = self._stream.info
        self.expected_duration_s, self.num_channels = info.duration_s, info.num_channels
        self.tracks_read = info.tracks_read
        if samples is not None:
            if self.listener is not None:
                self.listener(samples)
            channels = samples.T if self._task.split_channels else (samples,)
            both = zip(self._splitters, channels, strict=True)
            return self._numbered(splitter.push(of_channel) for splitter, of_channel in both)
        self._finished = True
        self.truncated = info.truncated
        if self.duration_s < MIN_AUDIO_S:
            raise AudioTooShort(
                f"The audio is {self.duration_s:g} s long; at least {MIN_AUDIO_S} s are needed."
            )
        return self._numbered(splitter.finish() for splitter in self._splitters)

    def _numbered(self, of_channels: Iterable[list[Chunk]]) -> list[Chunk]:
        return [
            msgspec.structs.replace(chunk, index=next(self._numbers), channel=channel)
            for channel, chunks in enumerate(of_channels)
            for chunk in chunks
        ]

    def _open(self) -> Stream:
        try:
            self._file = open_source(self._source)
        except OSError as error:
            if isinstance(self._source, Path):
                raise
            logger.error("an upload cannot be opened: %s", error)
            raise DecodingUnavailable(TOO_MANY_FILES) from error
        fd = self._file.fileno()
        decoder = open_wav(fd)
        if decoder is None:
            return RemoteStream(fd, self._task, self._closed)
        ranked([Track(1)], self._task.choice)  # WAV has no other
        stream = DecodedStream(decoder, self._task)
        self._task.limits.check_decoded(0, decoder.duration_s or 0.0)
        return stream

    def _release(self) -> None:
        stream, file, self._stream, self._file = self._stream, self._file, None, None
        if stream is not None:
            stream.close()
        if file is not None:
            file.close()
        for splitter in self._splitters:
            splitter.drop()


class ChunkSource:
    truncated = False
    tracks_read: tuple[Track, ...] = ()

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.duration_s = self.settled_s = chunk.duration_s

    async def next_slice(self, max_chunks: int) -> DecodeSlice:
        return DecodeSlice([self._chunk], finished=True)

    def close(self) -> None:
        pass


# -- The pool ------------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass
class PreprocessStats:
    queued: int = 0  # now
    busy: int = 0  # now
    slices: int = 0  # decoded
    finished: int = 0  # slices and any other work
    cancelled: int = 0
    chunk_bytes: int = 0  # handed on


class PreprocessPool:
    """Threads with one queue; what is in flight bounds it, because each part of it waits for its task."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.stats = PreprocessStats()
        self._lock = threading.Lock()
        self._recordings: WeakSet[Recording] = WeakSet()
        self._executor = ThreadPoolExecutor(num_workers, "asr-preprocess")

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
        self._count(slices=1, chunk_bytes=sum(chunk.samples.nbytes for chunk in decoded.chunks))
        return decoded

    async def run(self, function: Callable[..., T], *args: object) -> T:
        work = partial(self._work, time.monotonic(), function, args)
        self._count(queued=1)
        task: Future[T] = self._executor.submit(contextvars.copy_context().run, work)
        task.add_done_callback(self._on_done)
        return await asyncio.wrap_future(task)

    def _work(self, queued_at: float, function: Callable[..., T], args: tuple[object, ...]) -> T:
        started_at = time.monotonic()
        self._count(queued=-1, busy=1)
        try:
            return function(*args)
        finally:
            self._count(busy=-1, finished=1)
            metrics.on_preprocessed(queued_at, started_at)

    def _on_done(self, task: Future[T]) -> None:
        if task.cancelled():  # it never began
            self._count(queued=-1)

    def shutdown(self) -> None:
        for recording in self._recordings:
            recording.close()
        self._executor.shutdown(cancel_futures=True)

    def _count(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                setattr(self.stats, name, getattr(self.stats, name) + change)
