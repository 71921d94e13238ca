"""Words of segments, and parts that are cut, parted or without text."""

import msgspec
import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, DroppedSegment, Word
from asr_server.transcription import segments
from asr_server.transcription.segments import DecodedPart, Span
from tests.support.fake_replica import say
from tests.support.tokens import TOKENIZER, t, words

WORDS = DecodingOptions(language="en", word_timestamps=True)


def chunk(duration_s: float = 8.0) -> Chunk:
    samples = np.arange(round(duration_s * SAMPLE_RATE), dtype=np.float32)
    return Chunk(3, 10 * SAMPLE_RATE, samples, channel=1)


def timed(*tokens: int, every_s: float = 0.5) -> ChunkResult:
    """Each text token lasts so long and attends to its middle."""
    num_text = sum(map(TOKENIZER.is_text, tokens))
    times_s = tuple(every_s * n for n in range(num_text + 1))
    return msgspec.structs.replace(
        say(*tokens),
        token_times_s=times_s,
        token_peaks_s=tuple(s + every_s / 2 for s in times_s[:-1]),
        token_focus=(0.5,) * (len(times_s) - 1),
    )


def words_of(part: DecodedPart) -> list[list[str]]:
    return [[word.text for word in span.words] for span in part.spans]


def test_each_segment_has_its_words_and_the_last_ends_with_what_was_read() -> None:
    result = timed(t(0), *words("12"), t(1), t(1), *words("34"), t(2))
    part = segments.decode_part(chunk(), result, WORDS, TOKENIZER)
    assert words_of(part) == [[" one", " two"], [" three", " four"]]
    starts_s = [word.start_s for span in part.spans for word in span.words]
    assert starts_s == sorted(starts_s)
    assert starts_s[0] == 0.0
    assert 1.0 <= starts_s[2] < 1.2, "a word begins a little behind where attention comes to it"
    assert part.spans[1].words[-1].end_s == 2.0
    assert (part.channel, part.start_s, part.duration_s) == (1, 10.0, 8.0)
    late = msgspec.structs.replace(result, pauses_s=((2.25, 3.0),))
    part = segments.decode_part(chunk(), late, WORDS, TOKENIZER)
    assert part.spans[1].words[-1].end_s == 2.25, "sound goes on to the pause"
    unread = timed(t(0), *words("12"), t(1.1), t(1.1), *words("34"))
    part = segments.decode_part(
        chunk(), msgspec.structs.replace(unread, pauses_s=((1.125, 1.5),)), WORDS, TOKENIZER
    )
    assert words_of(part) == [[" one", " two"]]
    assert part.tail_s == pytest.approx(1.1)
    assert part.spans[0].words[-1].end_s == 1.0, "the pause lies behind what was read"


def test_without_alignment_words_share_their_segment_by_letters() -> None:
    result = say(t(1), *words("13"), t(5), t(6), t(6.5), *words("2"), t(7))
    part = segments.with_words_by_length(
        segments.decode_part(chunk(), result, WORDS, TOKENIZER), WORDS, TOKENIZER
    )
    assert part.spans[0].words == (Word(" one", 1.0, 2.5), Word(" three", 2.5, 5.0))
    (last,) = part.spans[-1].words
    assert last.text == " two"
    assert (last.start_s, last.end_s) == pytest.approx((6.5, 7.0))


def test_a_segment_without_words_has_the_times_of_its_words() -> None:
    said = Word(" one", 0.25, 1.0), Word(" two", 1.0, 1.75)
    spans = Span(0.0, 2.0, words("12"), (), said), Span(2.0, 3.0, words("3"), ())
    part = DecodedPart(10.0, 8.0, say(), spans, 3)
    first, second = segments.with_times_of_words(part).spans
    assert (first.start_s, first.end_s, first.words) == (0.25, 1.75, ())
    assert second == spans[1]
    (found, other) = segments.segments_of(part, TOKENIZER, "ann")
    assert (found.start_s, found.end_s, found.speaker, found.seek) == (10.25, 11.75, "ann", 1000)
    assert found.words == (Word(" one", 10.25, 11.0), Word(" two", 11.0, 11.75))
    assert (other.id, other.start_s, other.end_s, other.words) == (1, 12.0, 13.0, ())


def test_a_tail_is_parted_in_two() -> None:
    whole = chunk()
    part = segments.decode_part(whole, say(t(0), *words("1"), t(2), t(2)), WORDS, TOKENIZER)
    [tail] = segments.unread(whole, part)
    assert (tail.start_s, tail.duration_s, tail.index, tail.channel) == (12.0, 6.0, 3, 1)
    first, second = segments.unread(whole, msgspec.structs.replace(part, split_s=2.5))
    assert (first.start_s, first.duration_s) == (12.0, 2.5)
    assert (second.start_s, second.duration_s) == (14.5, 3.5)
    assert np.array_equal(np.concatenate([first.samples, second.samples]), tail.samples)
    assert segments.unread(whole, msgspec.structs.replace(part, tail_s=None)) == []


def test_what_lies_behind_the_end_of_a_part_is_not_lost() -> None:
    spans = Span(0.0, 2.0, words("1"), ()), Span(2.0, 3.0, words("2"), ()), Span(4.0, 5.0, words("3"), ())
    part = DecodedPart(10.0, 4.0, say(), spans[:1], 3)
    lost = segments.with_dropped(part, spans, "no_voice", TOKENIZER).dropped
    assert lost == (DroppedSegment(12.0, 13.0, " two", "no_voice"),)
    cut = msgspec.structs.replace(part, dropped=lost)
    assert segments.ending_at(cut, 1, 2.0).dropped == ()
    assert segments.ending_at(cut, 1, 2.5).dropped == lost
