"""Cuts a replica's tokens into segments with times, and finds what they leave unread.

Used by `chunk_reader.py` and `transcript_builder.py`. The rule is openai-whisper's (`transcribe.py`): a pair
of timestamp tokens side by side closes one segment and opens the next; a single one at the end says that the
rest of the window is read; a segment opened and not closed was cut off, and decoding goes on from the last
closed time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Final

import msgspec

from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, Segment, TokenLogprob, Word
from asr_server.tokenizer import Tokenizer
from asr_server.transcription.language import ENGLISH, UNSPACED
from asr_server.transcription.word_groups import group_words
from asr_server.transcription.word_times import AlignedWord, aligned_word, leave_out_pauses, words_within

MIN_TAIL_S: Final = 0.2  # a shorter unread tail holds no word
FRAMES_PER_S: Final = 100  # `seek` counts 10 ms frames


class Span(msgspec.Struct, frozen=True):
    """Text between two times, in seconds from the start of the audio that was read."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]  # timestamps included
    logprobs: tuple[float, ...]  # of each token
    words: tuple[Word, ...] = ()  # where word times were asked for


class DecodedPart(msgspec.Struct, frozen=True):
    """One part of one chunk, decoded: its spans, and where the unread tail begins if there is one.

    Holds no samples: parts wait until those before them are done, and the samples need not.
    """

    start_s: float  # of the part, in the file
    duration_s: float
    result: ChunkResult
    spans: tuple[Span, ...]
    num_read: int  # of the result's tokens, from the first
    tail_s: float | None = None  # from the start of the part
    channel: int = 0


def is_silence(result: ChunkResult, options: DecodingOptions) -> bool:
    """Whisper's judgement: probably nobody speaks, and the text is improbable too."""
    return (
        result.no_speech_prob > options.no_speech_threshold and result.avg_logprob < options.logprob_threshold
    )


def decode_part(
    chunk: Chunk, result: ChunkResult, options: DecodingOptions, tokenizer: Tokenizer, is_last: bool = False
) -> DecodedPart:
    """Cuts a result's tokens into spans. A silent one has none.

    There is no tail when this is the last part allowed, nor behind a limit that the client set itself.
    """
    if is_silence(result, options):
        return part_without_text(chunk, result)
    parser = _TimestampParser(tokenizer, chunk.duration_s)
    may_go_on = options.timestamps and options.max_new_tokens is None and not is_last
    num_read, tail_s = parser.tail(result) if may_go_on else (len(result.tokens), None)
    spans = tuple(parser.spans(result, num_read))
    if result.token_times_s:
        spans = _with_words(spans, result, chunk, tokenizer, spaced=is_spaced(options, result))
    return DecodedPart(chunk.start_s, chunk.duration_s, result, spans, num_read, tail_s, chunk.channel)


def num_spans(chunk: Chunk, result: ChunkResult, tokenizer: Tokenizer) -> int:
    """How many stretches of text a result holds, whatever becomes of them."""
    return len(list(_TimestampParser(tokenizer, chunk.duration_s).spans(result, len(result.tokens))))


def part_without_text(chunk: Chunk, result: ChunkResult) -> DecodedPart:
    """Of a chunk in which nobody speaks, whatever was read in it."""
    return DecodedPart(chunk.start_s, chunk.duration_s, result, (), 0, channel=chunk.channel)


def is_spaced(options: DecodingOptions, result: ChunkResult) -> bool:
    """Whether the text is in a language that puts spaces between words."""
    language = ENGLISH if options.task == "translate" else result.language or options.language
    return language not in UNSPACED


def _with_words(
    spans: Sequence[Span], result: ChunkResult, chunk: Chunk, tokenizer: Tokenizer, spaced: bool
) -> tuple[Span, ...]:
    """The spans with their words. What was read of the text is aligned with the audio up to what was not."""
    by_span: list[list[AlignedWord]] = []
    num_text = 0  # text tokens of the spans so far
    for span in spans:
        tokens = [token for token in span.tokens if tokenizer.is_text(token)]
        groups = group_words(tokens, tokenizer, spaced)
        by_span.append([aligned_word(g.text, result, num_text + g.first, num_text + g.end) for g in groups])
        num_text += len(tokens)
    peaks_s = result.token_peaks_s
    end_s = peaks_s[num_text] if num_text < len(peaks_s) else chunk.duration_s
    settled = iter(leave_out_pauses(list(chain(*by_span)), result.pauses_s, end_s))
    return tuple(
        msgspec.structs.replace(
            span, words=tuple(words_within(list(islice(settled, len(words))), span.start_s, span.end_s))
        )
        for span, words in zip(spans, by_span, strict=True)
    )


def unread_tail(chunk: Chunk, part: DecodedPart) -> Chunk | None:
    """The samples of `chunk` still to be read, as its next part."""
    return None if part.tail_s is None else rest_of(chunk, round(part.tail_s * SAMPLE_RATE))


def rest_of(chunk: Chunk, first: int) -> Chunk:
    """The chunk from that sample on."""
    return msgspec.structs.replace(
        chunk, start_sample=chunk.start_sample + first, samples=chunk.samples[first:]
    )


def ended_with_segments(part: DecodedPart) -> DecodedPart:
    """The part with no word behind its last segment: what is said there is read again."""
    if not part.spans:
        return part
    *before, last = part.spans
    words = tuple(Word(w.text, min(w.start_s, last.end_s), min(w.end_s, last.end_s)) for w in last.words)
    return msgspec.structs.replace(part, spans=(*before, msgspec.structs.replace(last, words=words)))


class _TimestampParser:
    """Reads timestamp tokens against one stretch of audio."""

    def __init__(self, tokenizer: Tokenizer, duration_s: float) -> None:
        self._begin = tokenizer.specials.timestamp_begin
        self._precision_s = tokenizer.time_precision_s
        self._duration_s = duration_s

    def time_s(self, token: int) -> float:
        return min((token - self._begin) * self._precision_s, self._duration_s)

    def is_time(self, token: int) -> bool:
        return token >= self._begin

    def borders(self, tokens: Sequence[int]) -> list[int]:
        """The indices between two timestamps side by side."""
        return [
            at for at in range(1, len(tokens)) if self.is_time(tokens[at - 1]) and self.is_time(tokens[at])
        ]

    def spans(self, result: ChunkResult, num_read: int) -> Iterator[Span]:
        """In order, times never running back; those without a text token are left out."""
        tokens = result.tokens[:num_read]
        edges = [0, *self.borders(tokens), len(tokens)]
        after_s = 0.0
        for first, last in pairwise(edges):
            part = tokens[first:last]
            if all(self.is_time(token) for token in part):
                continue
            start_s = self.time_s(part[0]) if self.is_time(part[0]) else after_s
            end_s = self.time_s(part[-1]) if self.is_time(part[-1]) else self._duration_s
            start_s = max(start_s, after_s)
            after_s = max(end_s, start_s)
            yield Span(start_s, after_s, part, result.logprobs[first:last])

    def tail(self, result: ChunkResult) -> tuple[int, float | None]:
        """How many tokens are read, and from where decoding has to go on; None: all is read."""
        closed = self._last_closed(result)
        tail_s = self.time_s(result.tokens[closed]) if closed is not None else 0.0
        if closed is None or not 0.0 < tail_s <= self._duration_s - MIN_TAIL_S:
            return len(result.tokens), None  # nowhere to go on from, or nothing there
        return closed + 1, tail_s

    def _last_closed(self, result: ChunkResult) -> int | None:
        """The index of the timestamp behind which the audio is unread."""
        tokens, borders = result.tokens, self.borders(result.tokens)
        last = len(tokens) - 1
        if last > 0 and self.is_time(tokens[last]) and last not in borders:
            return last if result.finish_reason == "length" else None
        return borders[-1] - 1 if borders else None


def segments(part: DecodedPart, tokenizer: Tokenizer, speaker: str | None = None) -> list[Segment]:
    """The part's spans on the file's clock. Spans whose text is empty are no segments.

    Their ids count from 0: the session numbers them through the file once they are in order.
    """
    made: list[Segment] = []
    for span in part.spans:
        text = tokenizer.decode(span.tokens)
        if text.strip():
            made.append(_segment(part, span, text, len(made), speaker))
    return made


def _segment(part: DecodedPart, span: Span, text: str, segment_id: int, speaker: str | None) -> Segment:
    result = part.result
    return Segment(
        id=segment_id,
        seek=round(part.start_s * FRAMES_PER_S),
        start_s=part.start_s + span.start_s,
        end_s=part.start_s + span.end_s,
        text=text,
        tokens=span.tokens,
        temperature=result.temperature,
        avg_logprob=result.avg_logprob,
        compression_ratio=result.compression_ratio,
        no_speech_prob=result.no_speech_prob,
        words=tuple(
            Word(word.text, part.start_s + word.start_s, part.start_s + word.end_s) for word in span.words
        ),
        speaker=speaker,
    )


def token_logprobs(part: DecodedPart, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """The text tokens of its spans, each with its log-probability and bytes."""
    return [
        _token_logprob(tokenizer.decode_bytes(token), logprob)
        for span in part.spans
        for token, logprob in zip(span.tokens, span.logprobs, strict=True)
        if tokenizer.is_text(token)
    ]


def _token_logprob(raw: bytes, logprob: float) -> TokenLogprob:
    return TokenLogprob(raw.decode("utf-8", "replace"), logprob, tuple(raw))
