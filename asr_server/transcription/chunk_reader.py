"""Reads one chunk to its end: part after part, in the language that is found. Used by `session.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from asr_server.audio import PreprocessPool
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import Chunk, ChunkResult, DecodingOptions
from asr_server.dispatch.queue import RequestHandle
from asr_server.transcription import assembly, segment_times, voice_check
from asr_server.transcription.assembly import DecodedPart
from asr_server.transcription.language_detector import LanguageDetector
from asr_server.transcription.previous_text import PreviousText
from asr_server.transcription.progress import ChunkProgress, EarlyResults
from asr_server.transcription.stall_watch import StallWatch

MAX_PARTS: Final = 8  # tries at one chunk's unread tails


class ChunkReader:
    """Has the chunks of one request decoded.

    Args:
        options: the request's.
        voice_pool: where segments in doubt are checked for a voice; None: they are kept.
        num_channels: kept apart, each with a previous text of its own.
    """

    def __init__(
        self,
        handle: RequestHandle,
        tokenizer: Tokenizer,
        options: DecodingOptions,
        language: LanguageDetector,
        voice_pool: PreprocessPool | None,
        watch: StallWatch,
        num_channels: int,
    ) -> None:
        self._handle = handle
        self._tokenizer = tokenizer
        self._options = options
        self._language = language
        self._voice_pool = voice_pool
        self._watch = watch
        self._previous_texts = [PreviousText(options.prompt_tokens) for _ in range(num_channels)]

    async def read(self, chunk: Chunk, language: str | None, progress: ChunkProgress) -> list[DecodedPart]:
        """One chunk to its end, with the times that are shown."""
        return await self._with_segment_times(chunk, await self._read(chunk, language, progress))

    async def _read(self, chunk: Chunk, language: str | None, progress: ChunkProgress) -> list[DecodedPart]:
        """One chunk in the language that it detects if none is given. Where the vote of several
        chunks ends with another one, it is read again.
        """
        if language is not None or self._language.is_per_chunk:
            return await self._read_parts(chunk, language, progress)
        parts = await self._read_parts(chunk, None, progress)
        guess = self._language.guess if any(part.spans for part in parts) else None
        self._language.on_decoded(guess)
        progress.on_wait_for_others()
        if guess is not None and (settled := await self._language.conclusion()) != guess:
            self._handle.stats.on_read_again("language_outvoted")
            parts = await self._read_parts(chunk, settled, progress, first_part=MAX_PARTS)
        return parts

    async def _with_segment_times(self, chunk: Chunk, parts: list[DecodedPart]) -> list[DecodedPart]:
        """With better times than the model's, where they are shown and no words give them."""
        options = self._options
        if self._voice_pool is None or options.word_timestamps or not options.segment_times:
            return parts
        with self._watch.waiting_for_pool():
            return await segment_times.without_silent_edges(parts, chunk, self._voice_pool)

    async def _read_parts(
        self, chunk: Chunk, language: str | None, progress: ChunkProgress, first_part: int = 0
    ) -> list[DecodedPart]:
        """Each part after the first is the tail that the one before has left unread, or has taken for silence
        while somebody speaks there.
        """
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
                options = msgspec.structs.replace(options, early_results=False, is_last_part=True)
            early_results = EarlyResults()
            on_early_result = self._reporter(early_results, tail, parts, options, progress)
            result = await self._handle.submit(
                tail, options, part, self._language.on_probabilities, on_early_result
            )
            result = early_results.keep(result, options)
            options = self._next_options(options, result)
            if _stopped_nowhere(result, options) and part == first_part:
                options = msgspec.structs.replace(options, timestamps=True)
                continue
            decoded = assembly.decode_part(tail, result, options, self._tokenizer)
            if assembly.is_silence(result, options):
                num_dropped = assembly.num_spans(tail, result, self._tokenizer)
                self._handle.stats.on_segments_dropped("judged_silence", num_dropped)
            if self._voice_pool is not None:
                num_spans = len(decoded.spans)
                num_sent = progress.num_spans(part=len(parts))
                may_go_on = not is_last and options.max_new_tokens is None
                with self._watch.waiting_for_pool():
                    decoded = await voice_check.drop_inventions(
                        decoded, tail, self._voice_pool, num_sent, may_go_on
                    )
                self._handle.stats.on_segments_dropped("no_voice", num_spans - len(decoded.spans))
            parts.append(decoded)
            previous_text.add(decoded)
            tail = None if is_last else await self._rest(tail, parts)
        return parts

    async def _rest(self, chunk: Chunk, parts: list[DecodedPart]) -> Chunk | None:
        """What is left to read of that which the last part was read from."""
        tail = assembly.unread_tail(chunk, parts[-1])
        if tail is not None:
            self._handle.stats.on_read_again("unread_tail")
            return tail
        if self._voice_pool is None or self._options.max_new_tokens is not None:
            return None
        with self._watch.waiting_for_pool():
            tail = await voice_check.passed_over(chunk, parts[-1], self._voice_pool)
        if tail is not None:
            self._handle.stats.on_read_again("speech_passed_over")
            parts[-1] = assembly.with_words_until(parts[-1], tail.start_s - chunk.start_s)
        return tail

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
        is_checked = self._voice_pool is not None and voice_check.holds_doubtful(early)
        return self._language.is_settled and not is_checked

    def _next_options(self, options: DecodingOptions, result: ChunkResult) -> DecodingOptions:
        """Later parts are read in the language of the first."""
        language = options.language or result.language or self._language.guess
        return msgspec.structs.replace(options, language=language)


def _stopped_nowhere(result: ChunkResult, options: DecodingOptions) -> bool:
    """Out of positions, and without timestamps nothing says how far it came: read it again with them."""
    return result.finish_reason == "length" and not options.timestamps and options.max_new_tokens is None
