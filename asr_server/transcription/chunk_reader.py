"""Has one chunk read to its end: part after part, in the language that is found. Used by `session.py`.

A part is one reading of a chunk: the first of all of it, each next one of the tail that the one before left
unread. Stretches of seconds without speech are not read: a chunk that holds some is read in pieces. Runs on
the event loop of the API process, and no model there: chunks go to `dispatch`.

A part's prompt is the request's, followed by the text so far, by the rules of openai-whisper (its
`transcribe.py`, `condition_on_previous_text`): that of the chunk, or of all chunks where the request asks for
that. `prompt_tokens` makes a prompt's tokens
for `api`, `realtime`, `wyoming.py` and `offline`, which make the decoding options.

`ChunkProgress` holds what is final of a chunk while it is still being read, for a stream that must not take
anything back. A replica reports the segments of a part as they are closed (`EarlyResult`), once they are
plausible by themselves. They are kept, whatever comes of the rest: where the whole part fails the
temperature ladder or is judged silence, or another replica takes over and reads differently, the part ends
with them, and the audio behind them is read again as the next part, like any tail that was left unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Final, Protocol

import msgspec

from asr_server.audio.pool import PreprocessPool
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import Chunk, ChunkResult, DecodingOptions, TranscriptDelta
from asr_server.dispatch.queue import RequestHandle
from asr_server.transcription import voice_check
from asr_server.transcription.language_detector import LanguageDetector
from asr_server.transcription.segments import (
    DecodedPart,
    decode_part,
    is_silence,
    num_spans,
    unread_tail,
    with_words_by_length,
)
from asr_server.transcription.stall_watch import StallWatch
from asr_server.transcription.voice_check import SpokenChunk

# Half of Whisper's text positions, less <|startofprev|>: the rule of openai-whisper.
MAX_PROMPT_TOKENS: Final = 223
MAX_KEYWORD_TOKENS: Final = 110  # and a full stop: the keywords may not push the whole prompt out
MAX_CHARS: Final = 8192  # more can never fit; keeps a huge field from costing time


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def prompt_tokens(encoder: Encoder, prompt: str, keywords: Sequence[str] = ()) -> tuple[int, ...]:
    """Text tokens to follow <|startofprev|>: keywords, then the prompt; of a long prompt the end is kept.

    A full stop ends the keywords: else speech that begins with one of them seems to continue the list.
    The text of special tokens in either is ordinary text to the encoder, never a command to the model.
    """
    listed = ", ".join(word.strip() for word in keywords if word.strip())
    keyword_tokens = _tokens(encoder, listed[:MAX_CHARS])[:MAX_KEYWORD_TOKENS]
    if keyword_tokens and not listed.endswith("."):
        keyword_tokens += encoder.encode(".")
    context = _tokens(encoder, prompt[-MAX_CHARS:])
    return (*keyword_tokens, *context[-(MAX_PROMPT_TOKENS - len(keyword_tokens)) :])


def _tokens(encoder: Encoder, text: str) -> list[int]:
    text = text.strip()
    return encoder.encode(" " + text) if text else []


UNRELIABLE_TEMPERATURE: Final = 0.5  # above it a text is no prompt for the next


class PreviousText:
    def __init__(self, prompt_tokens: tuple[int, ...]) -> None:
        self.tokens = prompt_tokens  # to decode the next part with

    def add(self, part: DecodedPart) -> None:
        """Adds the part's text with its timestamp tokens. A part in which nobody speaks changes nothing."""
        if part.result.temperature > UNRELIABLE_TEMPERATURE and part.num_read:
            self.tokens = ()
            return
        heard = tuple(token for span in part.spans for token in span.tokens)
        self.tokens = (*self.tokens, *heard)[-MAX_PROMPT_TOKENS:]


NOTHING_SENT: Final = TranscriptDelta("", (), (), None, 0, 0, 0.0)


class ChunkProgress:
    """A chunk that is being read: its finished parts, and the final segments of the part under way."""

    def __init__(self) -> None:
        self.parts: list[DecodedPart] = []
        self._finished = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_begun = asyncio.Event()

    def report(self, parts: list[DecodedPart]) -> None:
        self.parts = parts
        self._changed.set()
        self._has_begun.set()

    def finish(self, parts: list[DecodedPart]) -> None:
        self._finished.set()
        self.report(parts)

    def num_spans(self, part: int) -> int:
        """How many segments of the part with this number have been reported, and so are kept."""
        return len(self.parts[part].spans) if part < len(self.parts) else 0

    def on_wait_for_others(self) -> None:
        """This chunk now waits for others, so they must not wait for its first text: ends `first_text`."""
        self._has_begun.set()

    async def first_text(self) -> None:
        """Waits for the first report, for the end where there is none, or until others must go on first."""
        await self._has_begun.wait()

    async def is_finished(self) -> bool:
        """Waits until more is reported or all is read; whether all is read. An error ends the request, and
        with it this wait. For one waiter only.
        """
        await self._changed.wait()
        self._changed.clear()
        return self._finished.is_set()

    async def result(self) -> list[DecodedPart]:
        """Waits for all parts."""
        await self._finished.wait()
        return self.parts


class EarlyResults:
    """The segments that have been reported of one part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.last: ChunkResult | None = None
        self._tokenizer = tokenizer

    def add(self, result: ChunkResult) -> bool:
        """Takes a report; False if it does not continue the last one, as it comes from another replica."""
        if not self._is_beginning_of(result):
            return False
        self.last = result
        return True

    def keep(self, result: ChunkResult, options: DecodingOptions) -> ChunkResult:
        """The part's result, or the last report where the result would take that back."""
        if self.last is None or not self._is_beginning_of(result):
            return self.last or result
        return self._with_times_of(result, self.last) if is_silence(result, options) else result

    def _with_times_of(self, result: ChunkResult, last: ChunkResult) -> ChunkResult:
        """The last report with the times that its tokens have in the result, which begins with them."""
        num_text = sum(map(self._tokenizer.is_text, last.tokens))
        return msgspec.structs.replace(
            last,
            token_times_s=result.token_times_s[: num_text + 1],
            token_peaks_s=result.token_peaks_s[:num_text],
            pauses_s=result.pauses_s,
        )

    def _is_beginning_of(self, result: ChunkResult) -> bool:
        last = self.last
        return last is None or result.tokens[: len(last.tokens)] == last.tokens


def not_yet_sent(sent: TranscriptDelta, whole: TranscriptDelta) -> TranscriptDelta:
    """The delta that `whole` adds to `sent`."""
    assert whole.text.startswith(sent.text), "a delta is final when it is sent"
    return msgspec.structs.replace(
        whole,
        text=whole.text[len(sent.text) :],
        logprobs=whole.logprobs[len(sent.logprobs) :],
        num_audio_tokens=whole.num_audio_tokens - sent.num_audio_tokens,
        num_text_tokens=whole.num_text_tokens - sent.num_text_tokens,
    )


MAX_PARTS: Final = 8  # tries at one piece's unread tails
SECOND_READING: Final = 100  # the number of its first part, above those of any first reading


class ChunkReader:
    """Has the chunks of one request decoded.

    Args:
        options: the request's.
        voice_pool: threads in which doubtful segments are checked for a voice; None: they are kept.
        num_channels: how many are kept apart, each with a previous text of its own.
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

    async def listen(self, chunk: Chunk) -> SpokenChunk:
        """Find where somebody speaks in the chunk.

        A client's limit of tokens is for the chunk, which then stays whole.
        """
        if self._voice_pool is None or self._options.max_new_tokens is not None:
            return SpokenChunk([chunk])
        with self._watch.waiting_for_pool():
            return await voice_check.listen(chunk, self._voice_pool)

    async def read(
        self, chunk: Chunk, spoken: SpokenChunk, language: str | None, progress: ChunkProgress
    ) -> None:
        """Read the pieces of one chunk to their end; the segments have the times that are shown."""
        parts = await self._read(spoken, language, progress)
        progress.finish(await self._with_segment_times(chunk, spoken, parts))

    async def _read(
        self, spoken: SpokenChunk, language: str | None, progress: ChunkProgress
    ) -> list[DecodedPart]:
        """Reads one chunk in the language that it detects if none is given. Where the vote of several
        chunks ends with another language, the chunk is read again.
        """
        if language is not None or self._language.is_per_chunk:
            return await self._read_parts(spoken, language, progress)
        parts = await self._read_parts(spoken, None, progress)
        guess = self._language.guess if any(part.spans for part in parts) else None
        self._language.on_decoded(guess)
        progress.on_wait_for_others()
        if guess is not None and (settled := await self._language.conclusion()) != guess:
            self._handle.stats.on_read_again("language_outvoted")
            parts = await self._read_parts(spoken, settled, progress, first_part=SECOND_READING)
        return parts

    async def _with_segment_times(
        self, chunk: Chunk, spoken: SpokenChunk, parts: list[DecodedPart]
    ) -> list[DecodedPart]:
        """The parts with better segment times than the model's, if they are shown and no words give them."""
        options = self._options
        if self._voice_pool is None or options.word_timestamps or not options.segment_times:
            return parts
        with self._watch.waiting_for_pool():
            return await voice_check.without_silent_edges(parts, chunk, spoken, self._voice_pool)

    async def _read_parts(
        self, spoken: SpokenChunk, language: str | None, progress: ChunkProgress, first_part: int = 0
    ) -> list[DecodedPart]:
        options = msgspec.structs.replace(self._options, language=language)
        parts: list[DecodedPart] = []
        previous_text = PreviousText(self._options.prompt_tokens)
        if options.condition_on_previous_text:
            previous_text = self._previous_texts[spoken.pieces[0].channel]
        numbers = count(first_part)
        for piece in spoken.pieces:
            options = await self._read_piece(piece, spoken, options, parts, previous_text, progress, numbers)
        return parts

    async def _read_piece(
        self,
        piece: Chunk,
        spoken: SpokenChunk,
        options: DecodingOptions,
        parts: list[DecodedPart],
        previous_text: PreviousText,
        progress: ChunkProgress,
        numbers: Iterator[int],
    ) -> DecodingOptions:
        """Add the piece's parts; return the options for the next piece.

        Each part after the first is the tail that the one before has left unread, or has passed over.
        """
        tail: Chunk | None = piece
        for tries_left in range(MAX_PARTS, 0, -1):
            if tail is None:
                break
            options = msgspec.structs.replace(options, prompt_tokens=previous_text.tokens)
            is_last = tries_left == 1
            if is_last:  # what is sent of it early could not be followed by another part
                options = msgspec.structs.replace(options, early_results=False, is_last_part=True)
            early_results = EarlyResults(self._tokenizer)
            on_early_result = self._reporter(early_results, tail, spoken, parts, options, progress)
            result = await self._handle.submit(
                tail, options, next(numbers), self._language.on_probabilities, on_early_result
            )
            result = early_results.keep(result, options)
            options = self._next_options(options, result)
            decoded = await self._decoded(tail, result, options)
            num_sent = progress.num_spans(part=len(parts))
            if self._voice_pool is not None:
                num_decoded = len(decoded.spans)
                may_go_on = not is_last and options.max_new_tokens is None
                with self._watch.waiting_for_pool():
                    decoded = await voice_check.drop_inventions(
                        decoded, tail, spoken, self._voice_pool, num_sent, may_go_on
                    )
                self._handle.stats.on_segments_dropped("no_voice", num_decoded - len(decoded.spans))
            parts.append(decoded if is_last else await self._until_missed_speech(decoded, tail, num_sent))
            previous_text.add(parts[-1])
            tail = None if is_last else self._rest(tail, parts[-1], decoded)
        return msgspec.structs.replace(
            options, early_results=self._options.early_results, is_last_part=self._options.is_last_part
        )

    async def _decoded(self, chunk: Chunk, result: ChunkResult, options: DecodingOptions) -> DecodedPart:
        """Cut the result into segments, unless it is silence to Whisper and no speech to the detector."""
        is_surely_speech = False
        if is_silence(result, options):
            if self._voice_pool is not None:
                with self._watch.waiting_for_pool():
                    is_surely_speech = await voice_check.is_surely_speech(chunk, self._voice_pool)
            if not is_surely_speech:
                num_dropped = num_spans(chunk, result, self._tokenizer)
                self._handle.stats.on_segments_dropped("judged_silence", num_dropped)
        part = decode_part(chunk, result, options, self._tokenizer, is_surely_speech)
        if not options.word_timestamps or result.token_times_s:
            return part
        part = with_words_by_length(part, options, self._tokenizer)
        self._handle.stats.on_words_guessed(sum(len(span.words) for span in part.spans))
        return part

    async def _until_missed_speech(self, part: DecodedPart, chunk: Chunk, num_sent: int) -> DecodedPart:
        """The part up to speech that its segments leave out; whole where there is none."""
        if self._voice_pool is None or self._options.max_new_tokens is not None:
            return part
        with self._watch.waiting_for_pool():
            cut = await voice_check.until_missed_speech(part, chunk, self._voice_pool, num_sent)
        return cut or part

    def _rest(self, chunk: Chunk, part: DecodedPart, as_read: DecodedPart) -> Chunk | None:
        """The tail of `chunk` that is still to be read behind the part; None: nothing."""
        tail = unread_tail(chunk, part)
        if tail is not None:
            is_cut = part is not as_read
            self._handle.stats.on_read_again("speech_passed_over" if is_cut else "unread_tail")
        return tail

    def _reporter(
        self,
        early_results: EarlyResults,
        chunk: Chunk,
        spoken: SpokenChunk,
        before: list[DecodedPart],
        options: DecodingOptions,
        progress: ChunkProgress,
    ) -> Callable[[ChunkResult], None]:
        """Tells `progress` of the segments closed in the part under way, behind the parts before it."""

        def on_early_result(result: ChunkResult) -> None:
            decoded = decode_part(chunk, result, options, self._tokenizer)
            if self._is_final(decoded, spoken) and early_results.add(result):
                progress.report([*before, decoded])

        return on_early_result

    def _is_final(self, early: DecodedPart, spoken: SpokenChunk) -> bool:
        """Whether neither the vote on the language nor the voice detector can still replace an early text."""
        is_checked = self._voice_pool is not None and (
            voice_check.holds_doubtful(early, spoken) or voice_check.holds_long_gap(early)
        )
        return self._language.is_settled and not is_checked

    def _next_options(self, options: DecodingOptions, result: ChunkResult) -> DecodingOptions:
        """Later parts are read in the language of the first."""
        language = options.language or result.language or self._language.guess
        return msgspec.structs.replace(options, language=language)
