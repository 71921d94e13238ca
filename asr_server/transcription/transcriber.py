"""Take requests from audio to text: chunks go out as they are cut, text returns in file order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol

import msgspec

from asr_server.audio.recording import ChunkSource, DecodeSlice, PreprocessPool, Recording
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import (
    TEMPERATURE_LADDER,
    Chunk,
    DecodingOptions,
    Samples,
    Transcript,
    TranscriptDelta,
    temperatures_for,
)
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import RequestHandle
from asr_server.language_codes import Languages
from asr_server.telemetry import new_handle_id
from asr_server.transcription.language import MAX_VOTES, LanguageDetector
from asr_server.transcription.progress import (
    MAX_PROMPT_TOKENS,
    NOTHING_SENT,
    ChunkProgress,
    StallLimits,
    StallWatch,
    not_yet_sent,
)
from asr_server.transcription.reading import ChunkReader
from asr_server.transcription.segments import DecodedPart
from asr_server.transcription.transcript import TranscriptBuilder

OpenRequest = Callable[[str], RequestHandle]


class Labeller(Protocol):
    """Listen to a recording's samples, and label its transcript, as by who speaks."""

    def push(self, samples: Samples) -> None: ...

    async def wait_for_room(self) -> None: ...

    async def label(self, transcript: Transcript, tokenizer: Tokenizer) -> Transcript: ...

    def close(self) -> None: ...


class Transcriber:
    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: PreprocessPool,
        tokenizer: Tokenizer,
        check_voice: bool = True,
        stall_limits: StallLimits | None = None,
    ) -> None:
        specials = tokenizer.specials
        self.tokenizer = tokenizer
        self.languages = Languages(specials.languages if specials.is_multilingual else ())
        self.can_translate = self.languages.only is None and specials.translate is not None
        self.dispatcher, self.pool, self.check_voice = dispatcher, pool, check_voice
        self.stall_limits = stall_limits or StallLimits()

    def options(
        self,
        *,
        language: str | None = None,
        languages: Sequence[str] = (),
        params: tuple[str, str] = ("language", "languages[]"),
        multilingual: bool = False,
        prompt: str = "",
        keywords: Iterable[str] = (),
        temperature: float = 0.0,
        **own: Any,
    ) -> DecodingOptions:
        """Make the options of a request, live turn or file. Raises InvalidValue for an unknown language.

        Args:
            languages: candidates; several mean a recording in several languages.
            params: the client's field names for `language` and `languages`.
            own: fields of `DecodingOptions`.
        """
        code, candidates = self.languages.choice(language, languages, params)
        return DecodingOptions(
            language=code,
            candidate_languages=candidates,
            multilingual=multilingual or len(candidates) > 1,
            prompt_tokens=prompt_tokens(self.tokenizer, prompt),
            keywords=boosted_keywords(list(keywords)),
            temperatures=temperatures_for(temperature, TEMPERATURE_LADDER),
            early_results=True,
            **own,
        )

    @asynccontextmanager
    async def run(
        self,
        source: Recording | ChunkSource,
        options: DecodingOptions,
        speakers: Sequence[str] = (),
        labeller: Labeller | None = None,
        open_request: OpenRequest | None = None,
    ) -> AsyncIterator[Transcription]:
        """Run a request while the block runs; leaving it cancels the rest and closes the recording.

        Args:
            speakers: speakers of split channels, which exclude a labeller; else empty.
            open_request: opens it in the place of the dispatcher, as one that runs in the background.

        Raises, also inside the block: RequestError, EngineUnavailable, ChunkFailed.
        """
        open_request = open_request or partial(self.dispatcher.open, is_live=isinstance(source, ChunkSource))
        handle = open_request(new_handle_id())
        transcription = Transcription(self, handle, source, options, speakers, labeller)
        try:
            async with task_group() as group:
                transcription.start(group)
                try:
                    yield transcription
                finally:
                    transcription.stop()
        finally:
            transcription.close()

    async def transcribe_chunk(self, chunk: Chunk, options: DecodingOptions) -> TranscriptDelta:
        """Transcribe one chunk of live speech. Raises EngineUnavailable, ChunkFailed."""
        async with self.run(ChunkSource(chunk), options) as transcription:
            return await transcription.only_delta()


class Transcription:
    def __init__(
        self,
        transcriber: Transcriber,
        handle: RequestHandle,
        source: Recording | ChunkSource,
        options: DecodingOptions,
        speakers: Sequence[str],
        labeller: Labeller | None,
    ) -> None:
        tokenizer, pool = transcriber.tokenizer, transcriber.pool
        # Segments are sent before their chunk ends. Not where channels are split, as they wait for their
        # order; nor with a limit on tokens, where no tail is read again.
        if speakers or options.max_new_tokens is not None:
            options = msgspec.structs.replace(options, early_results=False)
        self.handle, self._source, self._options = handle, source, options
        self._tokenizer, self._pool, self._labeller = tokenizer, pool, labeller
        self._is_split = bool(speakers)
        if labeller is not None and isinstance(source, Recording):
            source.listener = labeller.push
        self._language = LanguageDetector(
            options.language or transcriber.languages.only,
            options.candidate_languages,
            # The text of one chunk is the prompt of the next: none can wait for a later one's vote.
            max_votes=1 if options.condition_on_previous_text else MAX_VOTES,
            per_chunk=options.multilingual,
        )
        self._watch = StallWatch(handle, pool, transcriber.stall_limits)
        self._reader = ChunkReader(
            *(handle, tokenizer, options, self._language, pool, transcriber.check_voice),
            *(self._watch, source, self._is_split),
        )
        self._builder = TranscriptBuilder(tokenizer, source, options, self._language, speakers)
        # What to wait for, in the order of the file. A number: all before these seconds has been sent.
        self._pending: asyncio.Queue[ChunkProgress | float | None] = asyncio.Queue()
        self._running: set[asyncio.Task[None]] = set()
        self._started_at = time.monotonic()
        self._watching: asyncio.Task[None]
        self._has_sent_text = False
        self._counted_s = 0.0

    def close(self) -> None:
        self.handle.cancel()
        self._source.close()
        self._reader.close()
        if self._labeller is not None:
            self._labeller.close()

    def start(self, group: asyncio.TaskGroup) -> None:
        self._run(group, self._produce_chunks(group))
        self._watching = group.create_task(self._watch.run(self._running))

    def stop(self) -> None:
        self._watching.cancel()
        for task in self._running:
            task.cancel()

    def _run(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def __aiter__(self) -> AsyncIterator[TranscriptDelta]:
        """Yield each chunk's or segment's text in file order, once all before it is final."""
        async for delta in self._all_deltas():
            self._builder.keep(delta)
            if delta.text and not self._has_sent_text:
                self._has_sent_text = True
                self.handle.stats.on_first_text(time.monotonic() - self._started_at)
            self._count_audio(delta.end_s, delta.language)
            yield delta
        self._count_audio(self._source.duration_s, self._language.code)

    async def only_delta(self) -> TranscriptDelta:
        """Return the delta of a one-chunk source, not counted in the metrics."""
        parts: list[DecodedPart] = []
        while isinstance(progress := await self._pending.get(), ChunkProgress):
            parts += await progress.result()
        return self._builder.delta(parts)

    def _count_audio(self, until_s: float, language: str | None) -> None:
        self.handle.stats.on_audio(max(0.0, until_s - self._counted_s), language)
        self._counted_s = max(self._counted_s, until_s)

    async def _all_deltas(self) -> AsyncIterator[TranscriptDelta]:
        while (pending := await self._pending.get()) is not None:
            if isinstance(pending, float):
                yield self._builder.settle(pending)
                continue
            sent = NOTHING_SENT
            while not await pending.wait_for_more():
                whole = self._builder.early_delta(pending.parts)
                yield not_yet_sent(sent, whole)
                sent = whole
            yield not_yet_sent(sent, self._builder.delta(await pending.result()))

    @property
    def language_probability(self) -> float | None:
        return self._language.probability

    async def transcript(self) -> Transcript:
        """Return all text, after the last delta, with its labels."""
        transcript = self._builder.transcript()
        if self._labeller is None:
            return transcript
        return await self._labeller.label(transcript, self._tokenizer)

    async def _produce_chunks(self, group: asyncio.TaskGroup) -> None:
        read_last: Callable[[], Awaitable[None]] | None = None
        finished = False
        while not finished:
            room = await self.handle.wait_for_capacity()
            with self._watch.waiting_for_pool():
                decoded = await self._next_slice(room)
            finished = decoded.finished
            for chunk in decoded.chunks:
                heard = await self._reader.hear(chunk)
                if heard.is_copy:
                    self._builder.drop_copy(chunk)
                    self.handle.stats.on_segments_dropped("same_channel", 1)
                for number in range(len(heard.stretches)):
                    # Waiting here while another chunk detects also keeps this side from decoding on.
                    language, progress = await self._language.next_language(), ChunkProgress()
                    self._pending.put_nowait(progress)
                    read = partial(self._reader.read, heard, number, language, progress)
                    is_last_stretch = number == len(heard.stretches) - 1
                    if finished and chunk is decoded.chunks[-1] and is_last_stretch:
                        read_last = read  # in this task: a short file needs no other
                    else:
                        self._run(group, read())
                        await self._until_next_may_go(progress, is_first=chunk.index == number == 0)
            if self._is_split:
                self._pending.put_nowait(math.inf if finished else self._source.settled_s)
        self._language.on_all_sent()
        self._pending.put_nowait(None)
        if read_last is not None:
            await read_last()

    async def _next_slice(self, room: int) -> DecodeSlice:
        if isinstance(self._source, ChunkSource):
            return await self._source.next_slice(room)
        if self._labeller is not None:
            await self._labeller.wait_for_room()
        return await self._pool.decode_slice(self._source, room)

    async def _until_next_may_go(self, progress: ChunkProgress, is_first: bool) -> None:
        if self._options.condition_on_previous_text:
            await progress.result()  # its text is part of the next one's prompt
        elif self._options.streams and is_first:
            await progress.first_text()  # which encoding more would hold up
        else:
            await asyncio.sleep(0)  # the chunk is in the queue by then: before the next one, and counted


MAX_BOOSTED_KEYWORDS: Final = 64
MAX_BOOSTED_CHARS: Final = 100  # of one: what is longer is a sentence
MAX_CHARS: Final = 8192  # more can never fit; keeps a huge field from costing time


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Return the tokens after <|startofprev|>. Keywords there would cost a word in a hundred elsewhere."""
    text = prompt[-MAX_CHARS:].strip()
    return tuple(tokenizer.encode(" " + text)[-MAX_PROMPT_TOKENS:]) if text else ()


def boosted_keywords(keywords: Sequence[str]) -> tuple[str, ...]:
    """Return the keywords that get a bonus in decoding, each once: the first ones, as many as may."""
    terms = (word.strip() for word in keywords)
    kept = dict.fromkeys(term for term in terms if 0 < len(term) <= MAX_BOOSTED_CHARS)
    return tuple(islice(kept, MAX_BOOSTED_KEYWORDS))


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
