"""Read one chunk to its end, part after part, in the detected language.

A part is one reading: first of the whole chunk, then of each unread tail. A chunk with seconds without
speech is read in pieces, and so is a segment that leaves speech out. A part that repeats a sentence of its
prompt is read again without it, and may detect its language.

Pieces that lose text beside loud sound are read again as one: music deafens the detector more than the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from asr_server.audio.pool import PreprocessPool
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, DroppedReason
from asr_server.dispatch.queue import RequestHandle
from asr_server.transcription import voice_check
from asr_server.transcription.chunk_progress import ChunkProgress, EarlyResults
from asr_server.transcription.language_detector import LanguageDetector
from asr_server.transcription.missed_speech import (
    holds_gap_with_speech,
    until_left_out,
    until_missed_speech,
    until_overlong,
)
from asr_server.transcription.prompt import PreviousText
from asr_server.transcription.repetition import letters_of, said_in, until_repetition, without_echoes
from asr_server.transcription.segments import (
    DecodedPart,
    Span,
    decode_part,
    ending_at,
    in_two,
    part_without_text,
    rest_of,
    spans_of,
    unread_tail,
    with_dropped,
    with_times_of_words,
    with_words_by_length,
)
from asr_server.transcription.stall_watch import StallWatch
from asr_server.transcription.voice_check import SpokenChunk

MAX_PARTS: Final = 8  # tries at one piece's unread tails
SECOND_READING: Final = 1000  # the number of its first part, above those of any first reading


@dataclass
class _Reading:
    spoken: SpokenChunk
    progress: ChunkProgress
    previous_text: PreviousText
    numbers: Iterator[int]  # of its parts
    pieces: deque[Chunk]  # not read yet
    prompt_before: tuple[int, ...]  # its first part's
    parts: list[DecodedPart] = field(default_factory=list)
    is_prompt_repeated: bool = False  # by the last part: the next one is read without it
    doubted_from_s: float | None = None  # in the file: uncut from there, the text was in doubt
    completed_to_s: float = 0.0  # in the file: audio before is not read again for what a segment leaves out

    def is_completed(self, part: DecodedPart) -> bool:
        return part.start_s < self.completed_to_s

    def add(self, part: DecodedPart) -> None:
        self.parts.append(part)
        self.previous_text.add(part)

    def in_one_piece(self) -> tuple[_Reading, Chunk] | None:
        """Return a reading of what a client may have, and the rest uncut, if that lost text."""
        spoken = self.spoken.uncut
        if spoken is None:
            return None
        previous_text = PreviousText(self.prompt_before)
        again = _Reading(spoken, ChunkProgress(), previous_text, self.numbers, deque(), self.prompt_before)
        sent, end_s = self._sent()
        for part in sent:
            again.add(part)
        [chunk] = spoken.pieces
        rest = rest_of(chunk, max(0, round(end_s * SAMPLE_RATE) - chunk.start_sample))
        return (again, rest) if self._has_lost_text(rest) else None

    def _sent(self) -> tuple[list[DecodedPart], float]:
        sent = self.progress.parts  # a client may have their segments
        if not any(part.spans for part in sent):
            return [], 0.0
        *before, last = self.parts[: len(sent)]
        spans = last.spans[: len(sent[-1].spans)]
        end_s = spans[-1].end_s if spans else 0.0
        return [*before, ending_at(last, len(spans), end_s)], last.start_s + end_s

    def _has_lost_text(self, rest: Chunk) -> bool:
        if rest.start_s == self.doubted_from_s:
            return False
        dropped = (each for part in self.parts for each in part.dropped if each.reason != "echo")
        return any(rest.start_s <= each.start_s < rest.start_s + rest.duration_s for each in dropped)

    def prompt(self, tokenizer: Tokenizer) -> set[str]:
        return set() if self.is_prompt_repeated else said_in(self.parts, tokenizer)

    def last_letters(self, tokenizer: Tokenizer) -> str:
        spans = [span for part in self.parts for span in part.spans]
        return letters_of(spans[-1], tokenizer) if spans else ""

    def is_repeated_by(self, early: DecodedPart, tokenizer: Tokenizer) -> bool:
        if until_repetition(early, self.prompt(tokenizer), tokenizer) is not None:
            return True
        return without_echoes(early, self.last_letters(tokenizer), self.spoken, tokenizer) != early


@dataclass(eq=False)
class ChunkReader:
    """Decode one request's chunks."""

    handle: RequestHandle
    tokenizer: Tokenizer
    options: DecodingOptions
    language: LanguageDetector
    voice_pool: PreprocessPool | None  # threads that check doubtful segments for a voice; None keeps them
    watch: StallWatch
    num_channels: int  # kept apart, each with its own previous text

    def __post_init__(self) -> None:
        options = self.options
        self._shows_words = options.word_timestamps
        if options.segment_times and self.voice_pool is not None:  # a model's own times ignore pauses
            self.options = msgspec.structs.replace(options, word_timestamps=True)
        prompt = options.prompt_tokens
        self._previous_texts = [PreviousText(prompt) for _ in range(self.num_channels)]

    async def listen(self, chunk: Chunk) -> SpokenChunk:
        """Find speech in the chunk; a client's token limit keeps the chunk whole."""
        if self.voice_pool is None or self.options.max_new_tokens is not None:
            return SpokenChunk([chunk])
        with self.watch.waiting_for_pool():
            return await voice_check.listen(chunk, self.voice_pool)

    async def read(
        self, chunk: Chunk, spoken: SpokenChunk, language: str | None, progress: ChunkProgress
    ) -> None:
        parts = await self._read(spoken, language, progress)
        progress.finish([self._as_asked(part) for part in parts])

    async def _read(
        self, spoken: SpokenChunk, language: str | None, progress: ChunkProgress
    ) -> list[DecodedPart]:
        if language is not None or self.language.is_per_chunk:
            return await self._read_parts(spoken, language, progress)
        parts = await self._read_parts(spoken, None, progress)
        guess = self.language.guess if any(part.spans for part in parts) else None
        self.language.on_decoded(guess)
        progress.on_wait_for_others()
        if guess is not None and (settled := await self.language.conclusion()) != guess:
            self.handle.stats.on_read_again("language_outvoted")
            parts = await self._read_parts(spoken, settled, progress, first_part=SECOND_READING)
        return parts

    def _as_asked(self, part: DecodedPart) -> DecodedPart:
        return part if self._shows_words else with_times_of_words(part)

    async def _read_parts(
        self, spoken: SpokenChunk, language: str | None, progress: ChunkProgress, first_part: int = 0
    ) -> list[DecodedPart]:
        options = msgspec.structs.replace(self.options, language=language)
        previous_text = PreviousText(self.options.prompt_tokens)
        if options.condition_on_previous_text:
            previous_text = self._previous_texts[spoken.pieces[0].channel]
        reading = _Reading(
            spoken, progress, previous_text, count(first_part), deque(spoken.pieces), previous_text.tokens
        )
        while reading.pieces:
            options = await self._read_piece(reading.pieces.popleft(), options, reading)
            if (again := reading.in_one_piece()) is None:
                continue
            uncut, rest = again
            if await self._read_uncut(uncut, rest, language):
                previous_text.tokens = uncut.previous_text.tokens
                return uncut.parts
            reading.doubted_from_s = rest.start_s
        return reading.parts

    async def _read_uncut(self, reading: _Reading, rest: Chunk, language: str | None) -> bool:
        """Return False if the text is in doubt."""
        self.handle.stats.on_read_again("uncut")
        options = msgspec.structs.replace(self.options, language=language or self.language.code)
        options = self._options_of_part(options, reading, is_last=False)
        result = await self._result(rest, options, reading)
        if not voice_check.is_trusted(result, self.tokenizer.decode(result.tokens), rest.duration_s):
            return False
        decoded = await self._decoded(rest, result, options)
        part = await self._until_missed_speech(decoded, rest, reading, num_sent=0)
        reading.add(part)
        tail = self._rest(rest, part, decoded, reading)
        if tail is not None:
            await self._read_piece(tail, self._next_options(options, result), reading)
        return True

    async def _read_piece(self, piece: Chunk, options: DecodingOptions, reading: _Reading) -> DecodingOptions:
        tail: Chunk | None = piece
        for tries_left in range(MAX_PARTS, 0, -1):
            if tail is None:
                break
            is_last = tries_left == 1
            options = self._options_of_part(options, reading, is_last)
            result = await self._result(tail, options, reading)
            options = self._next_options(options, result)
            decoded = await self._decoded(tail, result, options)
            num_sent = reading.progress.num_spans(part=len(reading.parts))
            may_go_on = not is_last and options.max_new_tokens is None
            if may_go_on:
                decoded = self._until_repetition(decoded, reading, num_sent)
            decoded = await self._without_inventions(decoded, tail, reading, num_sent, may_go_on)
            part = decoded if is_last else await self._until_missed_speech(decoded, tail, reading, num_sent)
            reading.add(part)
            tail = None if is_last else self._rest(tail, part, decoded, reading)
        return msgspec.structs.replace(
            options, early_results=self.options.early_results, is_last_part=self.options.is_last_part
        )

    def _options_of_part(self, options: DecodingOptions, reading: _Reading, is_last: bool) -> DecodingOptions:
        if reading.is_prompt_repeated:
            own = self.options
            options = msgspec.structs.replace(options, prompt_tokens=own.prompt_tokens, language=own.language)
        else:
            options = msgspec.structs.replace(options, prompt_tokens=reading.previous_text.tokens)
        if is_last:  # what is sent of it early could not be followed by another part
            options = msgspec.structs.replace(options, early_results=False, is_last_part=True)
        return options

    async def _result(self, chunk: Chunk, options: DecodingOptions, reading: _Reading) -> ChunkResult:
        early_results = EarlyResults(self.tokenizer)
        on_early_result = self._reporter(early_results, chunk, reading, options)
        is_alone = reading.is_prompt_repeated
        on_language = self.language.of_part if is_alone else self.language.on_probabilities
        result = await self.handle.submit(chunk, options, next(reading.numbers), on_language, on_early_result)
        kept = early_results.keep(result, options)
        return voice_check.with_silences(kept, chunk, reading.spoken)

    def _until_repetition(self, part: DecodedPart, reading: _Reading, num_sent: int) -> DecodedPart:
        cut = until_repetition(part, reading.prompt(self.tokenizer), self.tokenizer, num_sent)
        reading.is_prompt_repeated = cut is not None and cut.tail_s is not None
        return cut or part

    async def _without_inventions(
        self, part: DecodedPart, chunk: Chunk, reading: _Reading, num_sent: int, may_go_on: bool
    ) -> DecodedPart:
        if self.voice_pool is None:
            return part
        with self.watch.waiting_for_pool():
            voiced = await voice_check.drop_inventions(
                part, chunk, reading.spoken, self.voice_pool, num_sent, may_go_on
            )
        voiced = self._noted(voiced, part.spans, "no_voice")
        before = reading.last_letters(self.tokenizer)
        kept = without_echoes(voiced, before, reading.spoken, self.tokenizer, num_sent)
        return self._noted(kept, voiced.spans, "echo")

    def _noted(self, part: DecodedPart, spans: Sequence[Span], reason: DroppedReason) -> DecodedPart:
        noted = with_dropped(part, spans, reason, self.tokenizer)
        self.handle.stats.on_segments_dropped(reason, len(noted.dropped) - len(part.dropped))
        return noted

    async def _decoded(self, chunk: Chunk, result: ChunkResult, options: DecodingOptions) -> DecodedPart:
        """Cut the result into segments, unless Whisper hears silence and the detector no speech."""
        is_surely_speech = False
        if result.is_silence(options):
            if self.voice_pool is not None:
                with self.watch.waiting_for_pool():
                    is_surely_speech = await voice_check.is_surely_speech(chunk, self.voice_pool)
            if not is_surely_speech:
                spans = spans_of(chunk, result, self.tokenizer)
                return self._noted(part_without_text(chunk, result), spans, "judged_silence")
        part = decode_part(chunk, result, options, self.tokenizer, is_surely_speech)
        if not options.word_timestamps or result.token_times_s:
            return part
        part = with_words_by_length(part, options, self.tokenizer)
        self.handle.stats.on_words_guessed(sum(len(span.words) for span in part.spans))
        return part

    async def _until_missed_speech(
        self, part: DecodedPart, chunk: Chunk, reading: _Reading, num_sent: int
    ) -> DecodedPart:
        if self.voice_pool is None or self.options.max_new_tokens is not None:
            return part
        with self.watch.waiting_for_pool():
            part = await until_missed_speech(part, chunk, self.voice_pool, num_sent) or part
        if reading.is_completed(part):
            return part
        cut = until_left_out(part, chunk, reading.spoken, self.tokenizer, num_sent)
        if cut is None:
            return part
        reading.completed_to_s = chunk.start_s + chunk.duration_s
        return cut

    def _rest(self, chunk: Chunk, part: DecodedPart, as_read: DecodedPart, reading: _Reading) -> Chunk | None:
        tail = unread_tail(chunk, part)
        if tail is not None and reading.is_prompt_repeated:
            self.handle.stats.on_read_again("prompt_repeated")
        elif tail is not None:
            is_cut = part is not as_read
            self.handle.stats.on_read_again("speech_passed_over" if is_cut else "unread_tail")
        if tail is None or part.split_s is None:
            return tail
        reading.pieces.extendleft(reversed(in_two(tail, part.split_s)))
        return None

    def _reporter(
        self, early_results: EarlyResults, chunk: Chunk, reading: _Reading, options: DecodingOptions
    ) -> Callable[[ChunkResult], None]:
        def on_early_result(result: ChunkResult) -> None:
            decoded = decode_part(chunk, result, options, self.tokenizer)
            if self._is_final(decoded, chunk, reading) and early_results.add(result):
                reading.progress.report([*reading.parts, decoded])

        return on_early_result

    def _is_final(self, early: DecodedPart, chunk: Chunk, reading: _Reading) -> bool:
        if not self.language.is_settled or reading.is_repeated_by(early, self.tokenizer):
            return False
        if self.voice_pool is None:
            return True
        spoken = reading.spoken
        if voice_check.holds_doubtful(early, spoken) or holds_gap_with_speech(early, spoken):
            return False
        return reading.is_completed(early) or until_overlong(early, chunk, spoken, self.tokenizer) is None

    def _next_options(self, options: DecodingOptions, result: ChunkResult) -> DecodingOptions:
        language = options.language or result.language or self.language.guess
        return msgspec.structs.replace(options, language=language)
