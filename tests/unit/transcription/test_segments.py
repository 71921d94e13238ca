import msgspec
import numpy as np
import pytest

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, DroppedSegment, Word
from asr_server.transcription import segments
from asr_server.transcription.segments import DecodedPart, Span
from tests.support.fake_replica import say as said
from tests.support.speech import say, silence
from tests.support.tokens import TOKENIZER, spell, t, words
from tests.unit.transcription.pipeline import running_pipeline

PLAIN = DecodingOptions()


def chunk(duration_s: float = 20.0, start_s: float = 0.0, index: int = 0) -> Chunk:
    samples = np.arange(round(duration_s * SAMPLE_RATE), dtype=np.float32)
    return Chunk(index, round(start_s * SAMPLE_RATE), samples)


def heard(
    *tokens: int, finish_reason: str = "stop", avg_logprob: float = -0.2, no_speech_prob: float = 0.0
) -> ChunkResult:
    result = said(
        *tokens, finish_reason=finish_reason, avg_logprob=avg_logprob, no_speech_prob=no_speech_prob
    )
    logprobs = tuple(-0.01 * i for i in range(len(tokens)))
    return msgspec.structs.replace(
        result, logprobs=logprobs, compression_ratio=1.5, temperature=0.2, language="en"
    )


def read(result: ChunkResult, of: Chunk | None = None, options: DecodingOptions = PLAIN) -> DecodedPart:
    return segments.decode_part(of or chunk(), result, options, TOKENIZER)


def times(part: DecodedPart) -> list[tuple[float, float, str]]:
    found = segments.segments_of(part, TOKENIZER)
    return [(round(s.start_s, 3), round(s.end_s, 3), s.text) for s in found]


ONE_TWO = (t(0), *words("1"), t(2), t(3), *words("2"), t(5))
OPEN = (t(0), *words("1"), t(2), t(2.5), *words("23"))


@pytest.mark.parametrize(
    ("tokens", "duration_s", "expected", "tail_s"),
    [
        (
            (t(0.5), *words("12"), t(2), t(3), *words("3"), t(4)),
            20,
            [(0.5, 2, " one two"), (3, 4, " three")],
            None,
        ),
        ((t(1), *words("1"), t(29)), 5, [(1, 5, " one")], None),  # times end with the chunk
        ((t(2), *words("1"), t(4), t(3), *words("2"), t(3.5)), 20, [(2, 4, " one"), (4, 4, " two")], None),
        ((*ONE_TWO[:3], t(2)), 20, [(0, 2, " one")], 2.0),  # a pair at the end leaves the rest unread
        (ONE_TWO, 20, [(0, 2, " one"), (3, 5, " two")], None),  # a single one says that all is read
        (OPEN, 20, [(0, 2, " one")], 2.0),
        (
            (*ONE_TWO[:3], t(2), *words("2")),
            2.1,
            [(0, 2, " one"), (2, 2.1, " two")],
            None,
        ),  # a tail too short for a word is kept
        ((t(0), *words("1"), t(0), t(0), *words("2")), 20, [(0, 0, " one"), (0, 20, " two")], None),
        ((t(1), *words("12")), 8, [(1, 8, " one two")], None),
        (words("123"), 6, [(0, 6, " one two three")], None),
    ],
)
def test_timestamps_make_segments_and_leave_a_tail_unread(
    tokens: tuple[int, ...], duration_s: float, expected: list[tuple[float, float, str]], tail_s: float | None
) -> None:
    part = read(heard(*tokens), chunk(duration_s))
    assert times(part) == expected
    assert part.tail_s == tail_s


def test_times_are_those_of_the_file() -> None:
    part = read(heard(t(0.5), *words("1"), t(2)), chunk(start_s=27.3))
    assert times(part) == [(27.8, 29.3, " one")]
    assert segments.segments_of(part, TOKENIZER)[0].seek == 2730


def test_a_segment_without_text_is_none() -> None:
    part = read(heard(t(0), *spell(" "), t(2), t(3), *words("1"), t(4)))
    found = segments.segments_of(part, TOKENIZER)
    assert [(s.id, s.text) for s in found] == [(0, " one")]


def test_nothing_heard_is_no_segment() -> None:
    assert times(read(heard())) == []
    assert times(read(heard(t(0), t(3)))) == []


def test_a_segment_carries_the_figures_of_its_window() -> None:
    (segment,) = segments.segments_of(read(heard(t(0), *words("1"), t(2))), TOKENIZER)
    assert segment.tokens == (t(0), *words("1"), t(2))
    assert (segment.temperature, segment.avg_logprob) == (0.2, -0.2)
    assert (segment.compression_ratio, segment.no_speech_prob) == (1.5, 0.0)


def test_logprobs_are_those_of_the_text_that_was_read() -> None:
    part = read(heard(t(0), *words("1"), t(2), t(2.5), *words("23")))
    (entry,) = segments.token_logprobs(part, TOKENIZER)
    assert (entry.token, entry.logprob, bytes(entry.bytes)) == (" one", -0.01, b" one")


def test_half_a_character_is_still_bytes() -> None:
    first, second = segments.token_logprobs(read(heard(*spell("é")), options=PLAIN), TOKENIZER)
    assert bytes((*first.bytes, *second.bytes)) == "é".encode()
    assert first.token == "\ufffd"


def test_no_word_lies_where_the_audio_is_read_again() -> None:
    part = read(heard(t(0), *words("123"), t(2)))
    said = (Word(" one", 0.5, 1.0), Word(" two", 2.9, 5.0), Word(" three", 5.0, 5.4))
    part = msgspec.structs.replace(part, spans=(msgspec.structs.replace(part.spans[0], words=said),))
    cut = segments.ending_at(part, 1, 3.0).spans[0].words
    assert [(word.start_s, word.end_s) for word in cut] == [(0.5, 1.0), (2.9, 2.98), (2.98, 3.0)]
    silent = msgspec.structs.replace(part, spans=())
    assert segments.ending_at(silent, 0, 3.0).spans == ()


def test_words_that_reach_into_the_next_segment_end_where_it_begins() -> None:
    part = read(heard(t(0), *words("12"), t(2), t(2), *words("3"), t(4)))
    said = (Word(" one", 0.5, 1.0), Word(" two", 1.0, 2.5)), (Word(" three", 2.2, 3.0),)
    spans = tuple(msgspec.structs.replace(s, words=w) for s, w in zip(part.spans, said, strict=True))
    cut = segments.ending_at(msgspec.structs.replace(part, spans=spans), 2, 3.0).spans
    assert [(word.start_s, word.end_s) for word in cut[0].words] == [(0.5, 1.0), (1.0, 2.2)]
    assert [(word.start_s, word.end_s) for word in cut[1].words] == [(2.2, 3.0)]


async def test_without_words_segments_last_from_their_first_word_to_their_last() -> None:
    sound = np.concatenate([silence(2.0), say("830591").samples, silence(4.0), say("742").samples])
    options = DecodingOptions(language="en")
    async with running_pipeline(EMBEDDED_MODEL, check_voice=True) as pipeline:
        plain = await pipeline.transcribe(sound, options)
        timed = await pipeline.transcribe(sound, msgspec.structs.replace(options, word_timestamps=True))
    seen = [[(each.start_s, each.end_s, each.tokens) for each in found.segments] for found in (plain, timed)]
    assert seen[0] == seen[1]
    assert [segment.start_s > 1.9 for segment in plain.segments] == [True, True]


def test_segments_that_were_lost_are_noted_but_for_those_kept_or_read_again() -> None:
    part = read(
        heard(t(0), *words("1"), t(2), t(2), *words("2"), t(4), t(4), *words("3"), t(6)), chunk(start_s=30)
    )
    cut = msgspec.structs.replace(part, spans=part.spans[:1], tail_s=4.0)
    noted = segments.with_dropped(cut, part.spans, "echo", TOKENIZER)
    assert noted.dropped == (DroppedSegment(32.0, 34.0, " two", "echo"),)
    again = segments.with_dropped(
        msgspec.structs.replace(noted, tail_s=None), part.spans[2:], "no_voice", TOKENIZER
    )
    assert [(each.start_s, each.reason) for each in again.dropped] == [(32.0, "echo"), (34.0, "no_voice")]
    assert segments.ending_at(again, 1, 3.0).dropped == again.dropped[:1], "what is read again is not lost"


WORDS = DecodingOptions(language="en", word_timestamps=True)


def late_chunk(duration_s: float = 8.0) -> Chunk:
    samples = np.arange(round(duration_s * SAMPLE_RATE), dtype=np.float32)
    return Chunk(3, 10 * SAMPLE_RATE, samples, channel=1)


def timed(*tokens: int, every_s: float = 0.5) -> ChunkResult:
    """Each text token lasts so long; an eighth of it is over at its onset."""
    num_text = sum(map(TOKENIZER.is_text, tokens))
    times_s = tuple(every_s * n for n in range(num_text + 1))
    return msgspec.structs.replace(
        said(*tokens),
        token_times_s=times_s,
        token_onsets_s=tuple(s + every_s / 8 for s in times_s[:-1]),
        token_focus=(0.5,) * (len(times_s) - 1),
    )


def words_of(part: DecodedPart) -> list[list[str]]:
    return [[word.text for word in span.words] for span in part.spans]


def test_each_segment_has_its_words_and_the_last_ends_with_what_was_read() -> None:
    result = timed(t(0), *words("12"), t(1), t(1), *words("34"), t(2))
    part = segments.decode_part(late_chunk(), result, WORDS, TOKENIZER)
    assert words_of(part) == [[" one", " two"], [" three", " four"]]
    starts_s = [word.start_s for span in part.spans for word in span.words]
    assert starts_s == sorted(starts_s)
    assert starts_s[0] == 0.0
    assert 1.0 <= starts_s[2] < 1.2, "a word begins a little behind where attention comes to it"
    assert part.spans[1].words[-1].end_s == 2.0
    assert (part.channel, part.start_s, part.duration_s) == (1, 10.0, 8.0)
    late = msgspec.structs.replace(result, pauses_s=((2.25, 3.0),))
    part = segments.decode_part(late_chunk(), late, WORDS, TOKENIZER)
    assert part.spans[1].words[-1].end_s == 2.25, "sound goes on to the pause"
    unread = timed(t(0), *words("12"), t(1.1), t(1.1), *words("34"))
    part = segments.decode_part(
        late_chunk(), msgspec.structs.replace(unread, pauses_s=((1.125, 1.5),)), WORDS, TOKENIZER
    )
    assert words_of(part) == [[" one", " two"]]
    assert part.tail_s == pytest.approx(1.1)
    assert part.spans[0].words[-1].end_s == 1.0, "the pause lies behind what was read"


def test_without_alignment_words_share_their_segment_by_letters() -> None:
    result = said(t(1), *words("13"), t(5), t(6), t(6.5), *words("2"), t(7))
    part = segments.with_words_by_length(
        segments.decode_part(late_chunk(), result, WORDS, TOKENIZER), WORDS, TOKENIZER
    )
    assert part.spans[0].words == (Word(" one", 1.0, 2.5), Word(" three", 2.5, 5.0))
    (last,) = part.spans[-1].words
    assert last.text == " two"
    assert (last.start_s, last.end_s) == pytest.approx((6.5, 7.0))


def test_a_segment_without_words_has_the_times_of_its_words() -> None:
    two = Word(" one", 0.25, 1.0), Word(" two", 1.0, 1.75)
    spans = Span(0.0, 2.0, words("12"), (), two), Span(2.0, 3.0, words("3"), ())
    part = DecodedPart(10.0, 8.0, said(), spans, 3)
    first, second = segments.with_times_of_words(part).spans
    assert (first.start_s, first.end_s, first.words) == (0.25, 1.75, ())
    assert second == spans[1]
    (found, other) = segments.segments_of(part, TOKENIZER, "ann")
    assert (found.start_s, found.end_s, found.speaker, found.seek) == (10.25, 11.75, "ann", 1000)
    assert found.words == (Word(" one", 10.25, 11.0), Word(" two", 11.0, 11.75))
    assert (other.id, other.start_s, other.end_s, other.words) == (1, 12.0, 13.0, ())


def test_a_tail_is_parted_in_two() -> None:
    whole = late_chunk()
    part = segments.decode_part(whole, said(t(0), *words("1"), t(2), t(2)), WORDS, TOKENIZER)
    [tail] = segments.unread(whole, part)
    assert (tail.start_s, tail.duration_s, tail.index, tail.channel) == (12.0, 6.0, 3, 1)
    first, second = segments.unread(whole, msgspec.structs.replace(part, split_s=2.5))
    assert (first.start_s, first.duration_s) == (12.0, 2.5)
    assert (second.start_s, second.duration_s) == (14.5, 3.5)
    assert np.array_equal(np.concatenate([first.samples, second.samples]), tail.samples)
    assert segments.unread(whole, msgspec.structs.replace(part, tail_s=None)) == []


def test_what_lies_behind_the_end_of_a_part_is_not_lost() -> None:
    spans = Span(0.0, 2.0, words("1"), ()), Span(2.0, 3.0, words("2"), ()), Span(4.0, 5.0, words("3"), ())
    part = DecodedPart(10.0, 4.0, said(), spans[:1], 3)
    lost = segments.with_dropped(part, spans, "no_voice", TOKENIZER).dropped
    assert lost == (DroppedSegment(12.0, 13.0, " two", "no_voice"),)
    cut = msgspec.structs.replace(part, dropped=lost)
    assert segments.ending_at(cut, 1, 2.0).dropped == ()
    assert segments.ending_at(cut, 1, 2.5).dropped == lost
