"""Run one request: chunks go out as they are cut, text returns in file order.

Runs in tasks on the event loop, which it never blocks. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from asr_server.audio.recording import ChunkSource, DecodeSlice, Recording
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import Chunk, DecodingOptions, Samples, Transcript, TranscriptDelta
from asr_server.dispatch.queue import RequestHandle
from asr_server.transcription.language_detector import LanguageDetector
from asr_server.transcription.progress import NOTHING_SENT, ChunkProgress, not_yet_sent
from asr_server.transcription.reading import ChunkReader
from asr_server.transcription.stall_watch import StallWatch
from asr_server.transcription.transcript import TranscriptBuilder

NextSlice = Callable[[int], Awaitable[DecodeSlice]]  # given how many chunks there is room for


class Labeller(Protocol):
    """Listen to a recording's samples, and label its transcript, as by who speaks."""

    def push(self, samples: Samples) -> None: ...

    async def wait_for_room(self) -> None: ...

    async def label(self, transcript: Transcript, tokenizer: Tokenizer) -> Transcript: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class TranscriptionSession:
    handle: RequestHandle
    source: Recording | ChunkSource
    next_slice: NextSlice
    options: DecodingOptions
    language: LanguageDetector
    reader: ChunkReader
    builder: TranscriptBuilder
    watch: StallWatch
    channels_apart: bool
    labeller: Labeller | None

    def __post_init__(self) -> None:
        # What to wait for, in the order of the file. A number: all before these seconds has been sent.
        self._pending: asyncio.Queue[ChunkProgress | float | None] = asyncio.Queue()
        self._running: set[asyncio.Task[None]] = set()
        self._started_at = time.monotonic()
        self._has_sent_text = False
        self._counted_s = 0.0

    def close(self) -> None:
        self.handle.cancel()
        self.source.close()
        self.reader.channels.close()

    def start(self, group: asyncio.TaskGroup) -> None:
        self._run(group, self._produce_chunks(group))
        self.watch.start(group, self._running)

    def stop(self) -> None:
        self.watch.stop()
        for task in self._running:
            task.cancel()

    def _run(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def __aiter__(self) -> AsyncIterator[TranscriptDelta]:
        """Yield each chunk's or segment's text in file order, once all before it is final.

        With split channels, text waits until every channel is read as far.
        """
        async for delta in self._all_deltas():
            self.builder.keep(delta)
            if delta.text and not self._has_sent_text:
                self._has_sent_text = True
                self.handle.stats.on_first_text(time.monotonic() - self._started_at)
            self._count_audio(delta.end_s, delta.language)
            yield delta
        self._count_audio(self.source.duration_s, self.language.code)

    async def only_delta(self) -> TranscriptDelta:
        """Return the delta of a one-chunk source, not counted in the metrics."""
        progress = await self._pending.get()
        assert isinstance(progress, ChunkProgress)
        return self.builder.delta(await progress.result())

    def _count_audio(self, until_s: float, language: str | None) -> None:
        self.handle.stats.on_audio(max(0.0, until_s - self._counted_s), language)
        self._counted_s = max(self._counted_s, until_s)

    async def _all_deltas(self) -> AsyncIterator[TranscriptDelta]:
        while (pending := await self._pending.get()) is not None:
            if isinstance(pending, float):
                yield self.builder.settle(pending)
                continue
            sent = NOTHING_SENT
            while not await pending.is_finished():
                whole = self.builder.early_delta(pending.parts)
                yield not_yet_sent(sent, whole)
                sent = whole
            yield not_yet_sent(sent, self.builder.delta(await pending.result()))

    @property
    def language_probability(self) -> float | None:
        return self.language.probability

    async def transcript(self) -> Transcript:
        """Return all text, after the last delta, with its labels."""
        transcript = self.builder.transcript()
        if self.labeller is None:
            return transcript
        return await self.labeller.label(transcript, self.reader.tokenizer)

    # -- Chunks out --

    async def _produce_chunks(self, group: asyncio.TaskGroup) -> None:
        read_last: Callable[[], Awaitable[None]] = _nothing
        finished = False
        while not finished:
            room = await self.handle.wait_for_capacity()
            with self.watch.waiting_for_pool():
                decoded = await self.next_slice(room)
            finished = decoded.finished
            chunks = [piece for piece in decoded.pieces if isinstance(piece, Chunk)]
            for chunk in chunks:
                heard = await self.reader.hear(chunk)
                if heard.is_copy:
                    self.builder.drop_copy(chunk)
                # Waiting here while another chunk detects also keeps this side from decoding on.
                language, progress = await self.language.next_language(), ChunkProgress()
                self._pending.put_nowait(progress)
                read = partial(self.reader.read, heard, language, progress)
                if finished and chunk is chunks[-1]:
                    read_last = read
                else:
                    self._run(group, read())
                    await self._until_next_may_go(chunk, progress)
            if self.channels_apart:
                self._pending.put_nowait(math.inf if finished else self.source.settled_s)
        self.language.on_all_sent()
        self._pending.put_nowait(None)
        await read_last()

    async def _until_next_may_go(self, chunk: Chunk, progress: ChunkProgress) -> None:
        if self.options.condition_on_previous_text:
            await progress.result()  # its text is part of the next one's prompt
        elif self.options.streams and chunk.index == 0:
            await progress.first_text()  # which encoding more would hold up
        else:
            await asyncio.sleep(0)  # the chunk is in the queue by then: before the next one, and counted


async def _nothing() -> None:
    pass
