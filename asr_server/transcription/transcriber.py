"""The course of a request: audio in turns, chunks out as soon as they are cut, text back in file order."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from asr_server.audio import PreprocessPool, Recording
from asr_server.core import Chunk, ChunkResult, DecodingOptions, Passage, Segment, Transcript
from asr_server.tokenizer import Tokenizer
from asr_server.transcription import assembly
from asr_server.transcription.assembly import Reading
from asr_server.transcription.detection import Detection
from asr_server.transcription.language import ENGLISH, Languages, name_of
from asr_server.transcription.text import continuation
from asr_server.workers.dispatcher import Dispatcher, Ticket

MAX_PARTS: Final = 8  # tries at one chunk's unread tails
AUDIO_TOKENS_PER_S: Final = 50  # positions of Whisper's encoder

logger = logging.getLogger(__name__)


class Transcriber:
    """The rooms that a request passes through."""

    def __init__(self, dispatcher: Dispatcher, pool: PreprocessPool, tokenizer: Tokenizer) -> None:
        specials = tokenizer.specials
        self.tokenizer = tokenizer
        self.languages = Languages(specials.languages if specials.is_multilingual else ())
        self.can_translate = self.languages.only is None and specials.translate is not None
        self._dispatcher = dispatcher
        self._pool = pool

    @asynccontextmanager
    async def transcribe(self, recording: Recording, options: DecodingOptions) -> AsyncIterator[Course]:
        """Runs the request while the block runs; leaving the block, however, cancels what is unfinished.

        Raises, also inside the block: RequestError, EngineUnavailable, ChunkFailed.
        """
        ticket = self._dispatcher.open(uuid.uuid4().hex)
        course = Course(self, self._pool, ticket, recording, options)
        try:
            async with asyncio.TaskGroup() as group:
                course.start(group)
                yield course
                course.stop()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            ticket.cancel()
            recording.close()


class Course:
    """One request on its way. Iterate over the passages to the end, then ask for the transcript."""

    def __init__(
        self,
        rooms: Transcriber,
        pool: PreprocessPool,
        ticket: Ticket,
        recording: Recording,
        options: DecodingOptions,
    ) -> None:
        self._tokenizer = rooms.tokenizer
        self._pool = pool
        self._ticket = ticket
        self._recording = recording
        self._options = options
        self._language = Detection(options.language or rooms.languages.only, options.candidate_languages)
        self._in_order: asyncio.Queue[asyncio.Task[list[Reading]] | None] = asyncio.Queue()
        self._running: set[asyncio.Task[None] | asyncio.Task[list[Reading]]] = set()
        self._passages: list[Passage] = []
        self._text = ""
        self._num_segments = 0

    def start(self, group: asyncio.TaskGroup) -> None:
        self._running.add(group.create_task(self._cut(group)))

    def stop(self) -> None:
        for task in self._running:
            task.cancel()

    async def __aiter__(self) -> AsyncIterator[Passage]:
        """Each chunk's final text, in the order of the file, as soon as all before it is final too."""
        while task := await self._in_order.get():
            passage = self._passage(await task)
            self._passages.append(passage)
            yield passage

    # -- Chunks out --

    async def _cut(self, group: asyncio.TaskGroup) -> None:
        """Decodes in turns, as far ahead as the dispatcher lets this request."""
        finished = False
        while not finished:
            await asyncio.sleep(0)  # what was sent last is in the queue by then, and counts
            turn = await self._pool.turn(self._recording, await self._ticket.room())
            for piece in turn.pieces:
                if isinstance(piece, Chunk):
                    # Waiting here while another chunk detects also keeps this side from decoding on.
                    self._send(group, piece, await self._language.turn())
            finished = turn.finished
        self._in_order.put_nowait(None)

    def _send(self, group: asyncio.TaskGroup, chunk: Chunk, language: str | None) -> None:
        task = group.create_task(self._hear(chunk, language))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._in_order.put_nowait(task)

    async def _hear(self, chunk: Chunk, language: str | None) -> list[Reading]:
        """One chunk to its end: a tail that was left unread goes out again as the next part."""
        options = msgspec.structs.replace(self._options, language=language)
        readings: list[Reading] = []
        tail: Chunk | None = chunk
        for part in range(MAX_PARTS):
            if tail is None:
                break
            result = await self._ticket.submit(tail, options, part, self._language.choose)
            options = self._next_options(options, result)
            if _stopped_nowhere(result, options) and part == 0:
                options = msgspec.structs.replace(options, timestamps=True)
                continue
            readings.append(assembly.read(tail, result, options, self._tokenizer, part == MAX_PARTS - 1))
            tail = assembly.unread_tail(tail, readings[-1])
        if language is None:
            self._language.conclude(options.language if any(r.spans for r in readings) else None)
        return readings

    def _next_options(self, options: DecodingOptions, result: ChunkResult) -> DecodingOptions:
        """Later parts are read in the language of the first."""
        language = options.language or result.language or self._language.guess
        return msgspec.structs.replace(options, language=language)

    # -- Text back --

    def _passage(self, readings: list[Reading]) -> Passage:
        so_far, language = self._text, self._options.language or self._language.code
        segments: list[Segment] = []
        for reading in readings:
            segments += assembly.segments(reading, self._num_segments + len(segments), self._tokenizer)
        for segment in segments:
            self._text += continuation(self._text, segment.text, language)
        self._num_segments += len(segments)
        return Passage(
            text=self._text[len(so_far) :],
            segments=tuple(segments),
            logprobs=tuple(
                entry for reading in readings for entry in assembly.token_logprobs(reading, self._tokenizer)
            ),
            language=language,
            num_audio_tokens=math.ceil(readings[0].duration_s * AUDIO_TOKENS_PER_S),
            num_text_tokens=sum(reading.num_read for reading in readings),
        )

    def transcript(self) -> Transcript:
        """The whole. Only after the last passage."""
        if self._recording.truncated:
            logger.warning(
                "the recording ends early: transcribed the %.1f s read", self._recording.duration_s
            )
        passages = self._passages
        spoken = ENGLISH if self._options.task == "translate" else self._language.code
        return Transcript(
            text=self._text,
            segments=tuple(segment for passage in passages for segment in passage.segments),
            logprobs=tuple(entry for passage in passages for entry in passage.logprobs),
            language=name_of(spoken),
            duration_s=self._recording.duration_s,
            num_audio_tokens=sum(passage.num_audio_tokens for passage in passages),
            num_text_tokens=sum(passage.num_text_tokens for passage in passages),
            task=self._options.task,
        )


def _stopped_nowhere(result: ChunkResult, options: DecodingOptions) -> bool:
    """Out of positions, and without timestamps nothing says how far it came: read it again with them."""
    return result.finish_reason == "length" and not options.timestamps and options.max_new_tokens is None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error behind a task group's group: its first."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
