"""Cut a replica's tokens into segments with times, and find what they leave unread. Stateless."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final

import msgspec

from asr_server.checkpoint.tokenizer import Timestamps, Tokenizer
from asr_server.core import (
    SAMPLE_RATE,
    Chunk,
    ChunkResult,
    DecodingOptions,
    DroppedReason,
    DroppedSegment,
    Segment,
    TokenLogprob,
    Word,
)
from asr_server.language_codes import ENGLISH, UNSPACED
from asr_server.metrics import ReadAgainReason
from asr_server.transcription.confidence import TokensOfWord, confidences
from asr_server.transcription.word_times import (
    WordGroup,
    aligned_words,
    edges_by_letters,
    group_words,
    leave_out_pauses,
    words_until,
)

FRAMES_PER_S: Final = 100  # `seek` counts 10 ms frames
SAMPLES_PER_FRAME: Final = SAMPLE_RATE // FRAMES_PER_S  # so that a segment's `seek` is exact


class Span(msgspec.Struct, frozen=True):
    """Text between two times, in seconds from the start of the audio read."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]  # timestamps included
    logprobs: tuple[float, ...]  # of each token
    words: tuple[Word, ...] = ()  # where word times were asked for


class DecodedPart(msgspec.Struct, frozen=True):
    """One decoded part: its spans, and the start of its unread tail. Holds no samples."""

    start_s: float  # of the part, in the file
    duration_s: float
    result: ChunkResult
    spans: tuple[Span, ...]
    num_read: int  # of the result's tokens, from the first
    tail_s: float | None = None  # from the start of the part
    channel: int = 0
    dropped: tuple[DroppedSegment, ...] = ()  # text that it was read with
    split_s: float | None = None  # from the start of the tail: there it is parted, to be read in two
    is_rest_unsaid: bool = False  # so that nothing is read behind the split
    reason: ReadAgainReason = "unread_tail"  # why the tail is read

    @property
    def read_to_s(self) -> float:
        return self.duration_s if self.tail_s is None else self.tail_s


def decode_part(
    chunk: Chunk, result: ChunkResult, options: DecodingOptions, tokenizer: Tokenizer
) -> DecodedPart:
    """Cut tokens into spans, up to an unread tail."""
    timestamps = Timestamps(tokenizer, chunk.duration_s)
    num_read, tail_s = timestamps.tail(result, options)
    spans = tuple(_spans(result, num_read, timestamps))
    if result.token_times_s:
        end_s = chunk.duration_s if tail_s is None else tail_s
        spans = _with_words(spans, result, end_s, tokenizer, options)
    return DecodedPart(chunk.start_s, chunk.duration_s, result, spans, num_read, tail_s, chunk.channel)


def spans_of(chunk: Chunk, result: ChunkResult, tokenizer: Tokenizer) -> list[Span]:
    return list(_spans(result, len(result.tokens), Timestamps(tokenizer, chunk.duration_s)))


def with_dropped(
    part: DecodedPart, spans: Sequence[Span], reason: DroppedReason, tokenizer: Tokenizer
) -> DecodedPart:
    """Note the spans that the part has lost, except those read again."""
    kept = {(span.start_s, span.tokens) for span in part.spans}
    dropped = tuple(
        DroppedSegment(
            part.start_s + span.start_s, part.start_s + span.end_s, tokenizer.decode(span.tokens), reason
        )
        for span in spans
        if (span.start_s, span.tokens) not in kept and span.start_s < part.read_to_s
    )
    return msgspec.structs.replace(part, dropped=part.dropped + dropped)


def is_spaced(options: DecodingOptions, result: ChunkResult) -> bool:
    language = ENGLISH if options.task == "translate" else result.language or options.language
    return language not in UNSPACED


def _with_words(
    spans: Sequence[Span], result: ChunkResult, end_s: float, tokenizer: Tokenizer, options: DecodingOptions
) -> tuple[Span, ...]:
    spaced = is_spaced(options, result)
    groups: list[WordGroup] = []  # of all spans
    ends: list[int] = []  # of each span's words among them
    tokens: list[TokensOfWord] = []
    num_text = 0  # text tokens of the spans so far
    for span in spans:
        own, logprobs = _word_groups(span, tokenizer, spaced)
        groups += [WordGroup(g.text, num_text + g.first, num_text + g.end) for g in own]
        ends.append(len(groups))
        focus = result.token_focus[num_text : num_text + len(logprobs)]
        tokens += [TokensOfWord(logprobs[g.first : g.end], focus[g.first : g.end]) for g in own]
        num_text += len(logprobs)
    aligned = aligned_words(groups, result.token_times_s[: num_text + 1], result.token_onsets_s)
    words = leave_out_pauses(aligned, result.pauses_s, end_s)
    timed = iter(words) if options.text_only else map(_with_certainty, words, tokens, confidences(tokens))
    return tuple(
        msgspec.structs.replace(span, words=tuple(islice(timed, end - first)))
        for span, (first, end) in zip(spans, pairwise([0, *ends]), strict=True)
    )


def _word_groups(span: Span, tokenizer: Tokenizer, spaced: bool) -> tuple[list[WordGroup], list[float]]:
    both = zip(span.tokens, span.logprobs, strict=True)
    text = [(token, logprob) for token, logprob in both if tokenizer.is_text(token)]
    return group_words([token for token, _ in text], tokenizer, spaced), [logprob for _, logprob in text]


def _with_certainty(word: Word, tokens: TokensOfWord, confidence: float) -> Word:
    return msgspec.structs.replace(word, probability=tokens.probability, confidence=confidence)


def with_words_by_length(part: DecodedPart, options: DecodingOptions, tokenizer: Tokenizer) -> DecodedPart:
    """Time each word by its letters, after a replica was lost with its alignment."""
    spaced, spans = is_spaced(options, part.result), []
    for span in part.spans:
        texts = [group.text for group in _word_groups(span, tokenizer, spaced)[0]]
        edges_s = edges_by_letters(texts, span.start_s, span.end_s)
        words = tuple(Word(text, *each) for text, each in zip(texts, edges_s, strict=True))
        spans.append(msgspec.structs.replace(span, words=words))
    return msgspec.structs.replace(part, spans=tuple(spans))


def with_times_of_words(part: DecodedPart) -> DecodedPart:
    """Return the part without words; each span lasts from its first one to its last."""
    spans = (
        msgspec.structs.replace(span, start_s=span.words[0].start_s, end_s=span.words[-1].end_s, words=())
        if span.words
        else span
        for span in part.spans
    )
    return msgspec.structs.replace(part, spans=tuple(spans))


def unread(chunk: Chunk, part: DecodedPart) -> list[Chunk]:
    """Return what of the part's audio is to be read next, in one piece or two."""
    if part.tail_s is None:
        return []
    tail = rest_of(chunk, round(part.tail_s * SAMPLE_RATE))
    if part.split_s is None:
        return [tail]
    split = round(part.split_s * SAMPLE_RATE)
    first = msgspec.structs.replace(tail, samples=tail.samples[:split])
    return [first] if part.is_rest_unsaid else [first, rest_of(tail, split)]


def between(chunk: Chunk, start_s: float, end_s: float) -> Chunk:
    """Return a part of the chunk that begins on one of the file's frames."""
    first = round(start_s * FRAMES_PER_S) * SAMPLES_PER_FRAME
    first -= (chunk.start_sample + first) % SAMPLES_PER_FRAME if first else 0
    return rest_of(msgspec.structs.replace(chunk, samples=chunk.samples[: round(end_s * SAMPLE_RATE)]), first)


def on_frame_s(time_s: float, chunk: Chunk) -> float:
    """Return the time, or the file's next frame behind it."""
    first = math.ceil(time_s * SAMPLE_RATE)
    return (first + -(chunk.start_sample + first) % SAMPLES_PER_FRAME) / SAMPLE_RATE


def rest_of(chunk: Chunk, first: int) -> Chunk:
    return msgspec.structs.replace(
        chunk, start_sample=chunk.start_sample + first, samples=chunk.samples[first:]
    )


def ending_at(
    part: DecodedPart, num_kept: int, tail_s: float, reason: ReadAgainReason = "unread_tail"
) -> DecodedPart:
    """Return the part's first spans, with words that end by `tail_s`."""
    cut: list[Span] = []
    end_s = tail_s
    for span in reversed(part.spans[:num_kept]):
        words = words_until(span.words, end_s)
        cut.append(msgspec.structs.replace(span, words=words))
        end_s = words[0].start_s if words else end_s
    dropped = tuple(each for each in part.dropped if each.start_s < part.start_s + tail_s)
    return msgspec.structs.replace(
        part, spans=tuple(cut[::-1]), tail_s=tail_s, dropped=dropped, reason=reason
    )


def _spans(result: ChunkResult, num_read: int, timestamps: Timestamps) -> Iterator[Span]:
    tokens = result.tokens[:num_read]
    edges = [0, *timestamps.borders(tokens), len(tokens)]
    after_s = 0.0
    for first, last in pairwise(edges):
        part = tokens[first:last]
        if all(timestamps.is_time(token) for token in part):
            continue
        start_s = timestamps.time_s(part[0]) if timestamps.is_time(part[0]) else after_s
        end_s = timestamps.time_s(part[-1]) if timestamps.is_time(part[-1]) else timestamps.duration_s
        start_s = max(start_s, after_s)
        after_s = max(end_s, start_s)
        yield Span(start_s, after_s, part, result.logprobs[first:last])


def segments_of(part: DecodedPart, tokenizer: Tokenizer, speaker: str | None = None) -> list[Segment]:
    """Return the spans as segments on the file's clock. Ids count from 0."""
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
        start_s=part.start_s + (span.words[0].start_s if span.words else span.start_s),
        end_s=part.start_s + (span.words[-1].end_s if span.words else span.end_s),
        text=text,
        tokens=span.tokens,
        temperature=result.temperature,
        avg_logprob=result.avg_logprob,
        compression_ratio=result.compression_ratio,
        no_speech_prob=result.no_speech_prob,
        words=tuple(
            msgspec.structs.replace(
                word, start_s=part.start_s + word.start_s, end_s=part.start_s + word.end_s
            )
            for word in span.words
        ),
        speaker=speaker,
    )


def token_logprobs(part: DecodedPart, tokenizer: Tokenizer) -> list[TokenLogprob]:
    entries = []
    for span in part.spans:
        for token, logprob in zip(span.tokens, span.logprobs, strict=True):
            if tokenizer.is_text(token):
                raw = tokenizer.decode_bytes(token)
                entries.append(TokenLogprob(raw.decode("utf-8", "replace"), logprob, tuple(raw)))
    return entries
