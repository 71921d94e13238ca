"""Takes one request from audio to text: chunks leave as soon as they are cut, text comes back in file order.

It sends chunks through the dispatcher and decodes through the preprocess pool; it runs no model and no codec.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from asr_server import metrics
from asr_server.audio import PreprocessPool, Recording
from asr_server.core import (
    POSITIONS_PER_S,
    Chunk,
    ChunkResult,
    DecodingOptions,
    Segment,
    Transcript,
    TranscriptDelta,
)
from asr_server.telemetry import unique_request_id
from asr_server.tokenizer import Tokenizer
from asr_server.transcription import assembly, voice_check
from asr_server.transcription.assembly import DecodedPart
from asr_server.transcription.interleaving import Interleaver
from asr_server.transcription.language import ENGLISH, Languages, likeliest, name_of
from asr_server.transcription.language_detector import MAX_VOTES, LanguageDetector
from asr_server.transcription.previous_text import PreviousText
from asr_server.transcription.progress import NOTHING, ChunkProgress, EarlyResults, beyond
from asr_server.transcription.source import ChunkSource, RecordingSource, Source
from asr_server.transcription.text import continuation
from asr_server.workers.dispatcher import Dispatcher
from asr_server.workers.request_handle import RequestHandle

MAX_PARTS: Final = 8  # tries at one chunk's unread tails

logger = logging.getLogger(__name__)


class Transcriber:
    """Runs requests over the shared preprocessing pool and dispatcher."""

    def __init__(
        self, dispatcher: Dispatcher, pool: PreprocessPool, tokenizer: Tokenizer, check_voice: bool = True
    ) -> None:
        specials = tokenizer.specials
        self.tokenizer = tokenizer
        self.languages = Languages(specials.languages if specials.is_multilingual else ())
        self.can_translate = self.languages.only is None and specials.translate is not None
        self.pool = pool
        self.check_voice = check_voice
        self._dispatcher = dispatcher

    @asynccontextmanager
    async def transcribe(
        self, recording: Recording, options: DecodingOptions, speakers: Sequence[str] = ()
    ) -> AsyncIterator[TranscriptionSession]:
        """Runs the request while the block runs; leaving the block, however, cancels what is unfinished.

        Args:
            speakers: who speaks in each channel of a recording whose channels are kept apart; else empty.

        Raises, also inside the block: RequestError, EngineUnavailable, ChunkFailed.
        """
        async with self._run(RecordingSource(self.pool, recording), options, speakers) as session:
            yield session

    async def transcribe_chunk(self, chunk: Chunk, options: DecodingOptions) -> TranscriptDelta:
        """One chunk whose samples are at hand, as a request of its own. Cancelled, it frees its slot.

        Raises: EngineUnavailable, ChunkFailed.
        """
        async with self._run(ChunkSource(chunk), options) as session:
            return await session.only_delta()

    @asynccontextmanager
    async def _run(
        self, source: Source, options: DecodingOptions, speakers: Sequence[str] = ()
    ) -> AsyncIterator[TranscriptionSession]:
        handle = self._dispatcher.open(unique_request_id())
        session = TranscriptionSession(self, handle, source, options, speakers)
        try:
            async with asyncio.TaskGroup() as group:
                session.start(group)
                yield session
                session.stop()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            handle.cancel()
            source.close()


class TranscriptionSession:
    """One request on its way. Iterate over the deltas to the end, then ask for the transcript."""

    def __init__(
        self,
        transcriber: Transcriber,
        handle: RequestHandle,
        source: Source,
        options: DecodingOptions,
        speakers: Sequence[str] = (),
    ) -> None:
        self._tokenizer = transcriber.tokenizer
        self._pool, self._check_voice = transcriber.pool, transcriber.check_voice
        self._handle = handle
        self._source = source
        if speakers or options.max_new_tokens is not None:  # text waits, or has no unread tail
            options = msgspec.structs.replace(options, early_results=False)
        self._options = options
        self._speakers = speakers  # by channel; empty: they are mixed
        self._language = LanguageDetector(
            options.language or transcriber.languages.only,
            options.candidate_languages,
            # The text of one chunk is the prompt of the next: none can wait for a later one's vote.
            max_votes=1 if options.condition_on_previous_text else MAX_VOTES,
        )
        self._is_mixed = options.multilingual and self._language.code is None
        num_channels = max(1, len(speakers))
        self._previous_texts = [PreviousText(options.prompt_tokens) for _ in range(num_channels)]
        # What to wait for, in the order of the file. A number: all before these seconds has been sent.
        self._pending: asyncio.Queue[ChunkProgress | float | None] = asyncio.Queue()
        self._segments = Interleaver()
        self._settled_s = 0.0 if speakers else math.inf
        self._running: set[asyncio.Task[None] | asyncio.Task[list[DecodedPart]]] = set()
        self._deltas: list[TranscriptDelta] = []
        self._started_at = time.monotonic()
        self._text = ""
        self._has_sent_text = False
        self._counted_s = 0.0
        self._num_segments = 0

    def start(self, group: asyncio.TaskGroup) -> None:
        self._running.add(group.create_task(self._produce_chunks(group)))

    def stop(self) -> None:
        for task in self._running:
            task.cancel()

    async def __aiter__(self) -> AsyncIterator[TranscriptDelta]:
        """Each chunk's final text, in the order of the file, as soon as all before it is final too; with
        early results each segment's. Where channels are kept apart, text comes once every channel has been
        read as far.
        """
        async for delta in self._all_deltas():
            self._deltas.append(delta)
            if delta.text and not self._has_sent_text:
                self._has_sent_text = True
                metrics.first_text_seconds.observe(time.monotonic() - self._started_at)
            self._count_audio(delta.end_s)
            yield delta
        self._count_audio(self._source.duration_s)

    async def only_delta(self) -> TranscriptDelta:
        """Of a source of one chunk. It is left out of what requests are measured by: the caller knows
        whether it counts.
        """
        (delta,) = [delta async for delta in self._all_deltas()]
        return delta

    def _count_audio(self, until_s: float) -> None:
        """Up to here the text is final."""
        metrics.audio_transcribed_seconds.inc(max(0.0, until_s - self._counted_s))
        self._counted_s = max(self._counted_s, until_s)

    async def _all_deltas(self) -> AsyncIterator[TranscriptDelta]:
        while (pending := await self._pending.get()) is not None:
            if isinstance(pending, float):
                self._settled_s = pending
                yield self._delta([])
                continue
            sent = NOTHING
            while not await pending.is_finished():
                whole = self._early_delta(pending.parts)
                yield beyond(sent, whole)
                sent = whole
            yield beyond(sent, self._delta(await pending.result()))

    # -- Chunks out --

    async def _produce_chunks(self, group: asyncio.TaskGroup) -> None:
        """Decodes slice by slice, as far ahead as the dispatcher lets this request."""
        finished = False
        while not finished:
            await asyncio.sleep(0)  # what was sent last is in the queue by then, and counts
            decoded = await self._source.next_slice(await self._handle.wait_for_capacity())
            for piece in decoded.pieces:
                if isinstance(piece, Chunk):
                    # Waiting here while another chunk detects also keeps this side from decoding on.
                    language = None if self._is_mixed else await self._language.next_language()
                    progress = self._send(group, piece, language)
                    if self._options.condition_on_previous_text:
                        await progress.result()  # its text is part of the next one's prompt
                    elif self._options.early_results and piece.index == 0:
                        await progress.first_text()  # which encoding more would hold up
            finished = decoded.finished
            if self._speakers:
                self._pending.put_nowait(math.inf if finished else self._source.settled_s)
        self._language.on_all_sent()
        self._pending.put_nowait(None)

    def _send(self, group: asyncio.TaskGroup, chunk: Chunk, language: str | None) -> ChunkProgress:
        progress = ChunkProgress()
        task = group.create_task(self._transcribe_chunk(chunk, language, progress))
        progress.watch(task)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._pending.put_nowait(progress)
        return progress

    async def _transcribe_chunk(
        self, chunk: Chunk, language: str | None, progress: ChunkProgress
    ) -> list[DecodedPart]:
        """One chunk to its end, in the language that it detects if none is given. Where the vote of several
        chunks ends with another one, it is read again.
        """
        if language is not None or self._is_mixed:
            return await self._read(chunk, language, progress)
        parts = await self._read(chunk, None, progress)
        guess = self._language.guess if any(part.spans for part in parts) else None
        self._language.on_decoded(guess)
        if guess is not None and (settled := await self._language.conclusion()) != guess:
            parts = await self._read(chunk, settled, progress, first_part=MAX_PARTS)
        return parts

    async def _read(
        self, chunk: Chunk, language: str | None, progress: ChunkProgress, first_part: int = 0
    ) -> list[DecodedPart]:
        """Each part after the first is the tail that the one before has left unread."""
        options = msgspec.structs.replace(self._options, language=language)
        parts: list[DecodedPart] = []
        previous_text = self._previous_texts[chunk.channel]
        tail: Chunk | None = chunk
        for part in range(first_part, first_part + MAX_PARTS):
            if tail is None:
                break
            if options.condition_on_previous_text:
                options = msgspec.structs.replace(options, prompt_tokens=previous_text.tokens)
            is_last = part == first_part + MAX_PARTS - 1
            if is_last:  # what is sent of it early could not be followed by another part
                options = msgspec.structs.replace(options, early_results=False)
            early_results = EarlyResults()
            on_early_result = self._reporter(early_results, tail, parts, options, progress)
            result = await self._handle.submit(tail, options, part, self._choose_language, on_early_result)
            result = early_results.keep(result, options)
            options = self._next_options(options, result)
            if _stopped_nowhere(result, options) and part == first_part:
                options = msgspec.structs.replace(options, timestamps=True)
                continue
            decoded = assembly.decode_part(tail, result, options, self._tokenizer, is_last)
            if self._check_voice:
                num_sent = progress.num_spans(part=len(parts))
                decoded = await voice_check.without_invented(decoded, tail, self._pool, num_sent)
            parts.append(decoded)
            previous_text.add(parts[-1])
            tail = assembly.unread_tail(tail, parts[-1])
        return parts

    def _reporter(
        self,
        early_results: EarlyResults,
        chunk: Chunk,
        before: list[DecodedPart],
        options: DecodingOptions,
        progress: ChunkProgress,
    ) -> Callable[[ChunkResult], None]:
        """Tells `progress` of the segments closed in the part under way, behind the parts before it."""

        def on_early_result(result: ChunkResult) -> None:
            decoded = assembly.decode_part(chunk, result, options, self._tokenizer)
            if self._is_final(decoded) and early_results.add(result):
                progress.report([*before, decoded])

        return on_early_result

    def _is_final(self, early: DecodedPart) -> bool:
        """Whether neither the vote on the language nor the voice detector can still replace an early text."""
        is_settled = self._is_mixed or self._language.code is not None
        return is_settled and not (self._check_voice and voice_check.holds_doubtful(early))

    def _choose_language(self, probabilities: dict[str, float]) -> str:
        """Of a chunk whose language is not given."""
        if self._is_mixed:
            return likeliest(probabilities, self._options.candidate_languages)
        return self._language.on_probabilities(probabilities)

    def _next_options(self, options: DecodingOptions, result: ChunkResult) -> DecodingOptions:
        """Later parts are read in the language of the first."""
        language = options.language or result.language or self._language.guess
        return msgspec.structs.replace(options, language=language)

    # -- Text back --

    def _delta(self, parts: list[DecodedPart]) -> TranscriptDelta:
        """Of one chunk's parts, and of what was held back for them; no parts: only of the latter."""
        so_far, language = self._text, self._language_of(parts)
        segments = self._next_segments(parts)
        for segment in segments:
            self._text += continuation(self._text, segment.text, language)
        self._num_segments += len(segments)
        return TranscriptDelta(
            text=self._text[len(so_far) :],
            segments=tuple(segments),
            logprobs=tuple(
                entry for part in parts for entry in assembly.token_logprobs(part, self._tokenizer)
            ),
            language=language,
            num_audio_tokens=math.ceil(parts[0].duration_s * POSITIONS_PER_S) if parts else 0,
            num_text_tokens=sum(part.num_read for part in parts),
            end_s=min(
                self._settled_s, parts[0].start_s + parts[0].duration_s if parts else self._source.duration_s
            ),
        )

    def _language_of(self, parts: list[DecodedPart]) -> str | None:
        return parts[0].result.language if self._is_mixed and parts else self._language.code

    def _early_delta(self, parts: list[DecodedPart]) -> TranscriptDelta:
        """Of what is final of the chunk under way. Its segments come with the chunk's end."""
        text, language = self._text, self._language_of(parts)
        for part in parts:
            for segment in assembly.segments(part, self._tokenizer):
                text += continuation(text, segment.text, language)
        return TranscriptDelta(
            text=text[len(self._text) :],
            segments=(),
            logprobs=tuple(
                entry for part in parts for entry in assembly.token_logprobs(part, self._tokenizer)
            ),
            language=language,
            num_audio_tokens=0,
            num_text_tokens=sum(part.num_read for part in parts),
            end_s=parts[-1].start_s,
        )

    def _next_segments(self, parts: list[DecodedPart]) -> list[Segment]:
        """Those that are final now, numbered through the whole file."""
        for part in parts:
            speaker = self._speakers[part.channel] if self._speakers else None
            self._segments.add(assembly.segments(part, self._tokenizer, speaker))
        return [
            msgspec.structs.replace(segment, id=segment_id)
            for segment_id, segment in enumerate(self._segments.take(self._settled_s), self._num_segments)
        ]

    def transcript(self) -> Transcript:
        """The whole. Only after the last delta."""
        if self._source.truncated:
            logger.warning("the recording ends early: transcribed the %.1f s read", self._source.duration_s)
        deltas = self._deltas
        spoken = ENGLISH if self._options.task == "translate" else self._main_language()
        return Transcript(
            text=self._text,
            segments=tuple(segment for delta in deltas for segment in delta.segments),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            language=name_of(spoken),
            duration_s=self._source.duration_s,
            num_audio_tokens=sum(delta.num_audio_tokens for delta in deltas),
            num_text_tokens=sum(delta.num_text_tokens for delta in deltas),
            task=self._options.task,
            languages=tuple(
                dict.fromkeys(delta.language for delta in deltas if delta.text and delta.language)
            ),
            is_cut_short=self._source.truncated,
            language_probability=self._language.probability,
        )

    def _main_language(self) -> str | None:
        """Of a recording of several languages, the one with most text."""
        lengths = Counter[str]()
        for delta in self._deltas if self._is_mixed else ():
            if delta.language and delta.text:
                lengths[delta.language] += len(delta.text)
        return max(lengths, key=lengths.__getitem__, default=self._language.code)


def _stopped_nowhere(result: ChunkResult, options: DecodingOptions) -> bool:
    """Out of positions, and without timestamps nothing says how far it came: read it again with them."""
    return result.finish_reason == "length" and not options.timestamps and options.max_new_tokens is None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error behind a task group's group: its first."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
