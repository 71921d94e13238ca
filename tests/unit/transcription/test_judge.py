"""Which segments of a part stand, which are dropped, and from where its audio is read again."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_server.audio.voice import FRAME_S
from asr_server.core import SAMPLE_RATE, Chunk, DecodingOptions, Word
from asr_server.levels import Interval, joined
from asr_server.transcription import segments
from asr_server.transcription.heard import Heard
from asr_server.transcription.judge import Known, is_trusted, judge, letters_of, may_leave, sentences_of
from asr_server.transcription.segments import DecodedPart, Span, decode_part
from tests.support.fake_replica import say
from tests.support.speech import silence
from tests.support.tokens import TOKENIZER, spell, t, words
from tests.unit.transcription.parts import timed

SENTENCE, OTHER = words("3141"), words("2718")
LIKELY, UNLIKELY = -0.1, -1.0
START_S = 20.0  # of every part below, in its file
WORD = Word(" one", 0.2, 1.0)
CHUNK = Chunk(0, round(START_S * SAMPLE_RATE), silence(12.0))


def part_of(*segments: tuple[float, float, float], no_speech_prob: float = 0.0) -> tuple[DecodedPart, Chunk]:
    """Segments from start to end in seconds, each with the log-probability of its token."""
    spans = tuple(Span(start_s, end_s, words("1"), (logprob,)) for start_s, end_s, logprob in segments)
    return DecodedPart(START_S, CHUNK.duration_s, say(no_speech_prob=no_speech_prob), spans, 1), CHUNK


def known(*certain_s: Interval, **other: Any) -> Known:
    """Certain speech by the clock of the part."""
    in_file_s = [(START_S + start_s, START_S + end_s) for start_s, end_s in certain_s]
    middles_s = (np.arange(int(CHUNK.duration_s / FRAME_S)) + 0.5) * FRAME_S
    frames = np.array([any(a <= at_s < b for a, b in certain_s) for at_s in middles_s], np.float32)
    return Known(Heard(CHUNK, [], in_file_s, in_file_s, frames, is_checked=True), TOKENIZER, **other)


# -- Doubt ---------------------------------------------------------------------------------------------------


def test_what_nobody_says_is_dropped_and_named() -> None:
    part, chunk = part_of((0.0, 2.0, LIKELY), (3.0, 4.0, UNLIKELY), (5.0, 6.0, LIKELY), no_speech_prob=0.6)
    heard = msgspec.structs.replace(known((0.5, 1.5), (5.2, 5.8)).heard, certain_s=())
    found = judge(part, chunk, Known(heard, TOKENIZER))
    assert (found.spans, found.tail_s) == ((part.spans[0], part.spans[2]), None)
    (dropped,) = found.dropped
    assert (dropped.start_s, dropped.reason) == (START_S + 3.0, "no_voice")


def test_where_somebody_speaks_behind_what_nobody_says_it_is_read_again_from_there() -> None:
    """Its words may be theirs, with times that are too early."""
    part, chunk = part_of((0.0, 2.0, UNLIKELY), (2.5, 3.5, LIKELY), no_speech_prob=0.6)
    found = judge(part, chunk, known((2.6, 3.4), (4.0, 6.0)))
    assert found.spans == ()
    assert found.tail_s == pytest.approx(2.3, abs=0.011)
    last = judge(part, chunk, known((2.6, 3.4), (4.0, 6.0), may_go_on=False, may_complete=False))
    assert (last.spans, last.tail_s) == (part.spans[1:], None), "there is no further part"


def test_speech_of_which_all_text_is_dropped_is_read_in_two() -> None:
    part, chunk = part_of((0.0, 12.0, UNLIKELY), no_speech_prob=0.9)
    spoken = known((0.1, 4.0), (5.0, 9.0)).heard
    heard = msgspec.structs.replace(
        spoken, frames=np.zeros_like(spoken.frames), certain_s=spoken.certain_s[:1]
    )
    found = judge(part, chunk, Known(heard, TOKENIZER))
    assert (found.spans, found.tail_s) == ((), 0.0)
    assert found.split_s == pytest.approx(4.5, abs=0.011)


def test_the_same_audio_is_not_read_again_nor_that_of_kept_text() -> None:
    part, chunk = part_of((0.0, 0.4, UNLIKELY), no_speech_prob=0.6)
    assert judge(part, chunk, known((0.7, 0.9))).tail_s is None
    part, chunk = part_of((0.0, 3.9, LIKELY), (3.9, 4.0, UNLIKELY), no_speech_prob=0.6)
    assert judge(part, chunk, known((0.5, 3.5), (4.2, 6.0))).tail_s == pytest.approx(3.9)


def test_what_a_client_has_already_stands() -> None:
    part, chunk = part_of((0.0, 1.0, UNLIKELY), (1.0, 2.0, UNLIKELY), no_speech_prob=0.6)
    assert judge(part, chunk, known(num_sent=1)).spans == part.spans[:1]


def test_the_surer_the_model_is_of_speech_the_less_the_detector_has_to_hear() -> None:
    """As under loud music."""
    frames = np.full(int(CHUNK.duration_s / FRAME_S), 0.05, np.float32)
    deafened = Known(Heard(CHUNK, [], frames=frames, is_checked=True), TOKENIZER)
    span = Span(1.0, 3.0, spell("x" * 40), (LIKELY,) * 40)
    for no_speech_prob, stands in [(0.01, True), (0.9, False)]:
        part = DecodedPart(START_S, 12.0, say(no_speech_prob=no_speech_prob), (span,), 40)
        assert bool(judge(part, CHUNK, deafened).spans) == may_leave(part, CHUNK, deafened) == stands


def test_a_text_that_nobody_can_say_in_so_short_a_sound_is_dropped() -> None:
    for num_letters, stands in [(14, True), (15, False)]:
        span = Span(0.0, 0.28, spell("x" * num_letters), (LIKELY,) * num_letters)
        part = DecodedPart(START_S, 0.28, say(), (span,), num_letters)
        assert bool(judge(part, CHUNK, known((0.0, 0.28))).spans) == stands


@pytest.mark.parametrize(
    ("no_speech_prob", "num_letters", "trusted"), [(0.2, 60, True), (0.2, 59, False), (0.99, 60, False)]
)
def test_a_text_is_trusted_without_the_detector_if_it_is_likely_and_fills_its_time(
    no_speech_prob: float, num_letters: int, trusted: bool
) -> None:
    result = say(t(0), *spell("a" * num_letters), t(12), avg_logprob=-0.6, no_speech_prob=no_speech_prob)
    part = decode_part(CHUNK, result, DecodingOptions(language="en"), TOKENIZER)
    unheard = Known(Heard(CHUNK, [], is_checked=True), TOKENIZER)
    assert is_trusted(part, unheard) == trusted
    assert not is_trusted(msgspec.structs.replace(part, result=say(), spans=()), unheard)


# -- Repetition ----------------------------------------------------------------------------------------------


def sentences(*times_s: tuple[float, float], duration_s: float = 12.0) -> tuple[DecodedPart, Chunk]:
    """The same sentence at each of these times."""
    chunk = Chunk(0, round(START_S * SAMPLE_RATE), silence(duration_s))
    tokens = [token for start_s, end_s in times_s for token in (t(start_s), *SENTENCE, t(end_s))]
    return decode_part(chunk, say(*tokens), DecodingOptions(language="en"), TOKENIZER), chunk


def test_of_equal_neighbours_the_one_without_enough_speech_goes() -> None:
    part, chunk = sentences((0, 2), (4, 6), (8, 10))
    spoken = (0.0, 2.0), (8.0, 10.0)
    found = judge(part, chunk, known(*spoken))
    assert found.spans == (part.spans[0], part.spans[2])
    assert [each.reason for each in found.dropped] == ["echo"]
    before = letters_of(part.spans[0], TOKENIZER)
    assert judge(part, chunk, known((8.0, 10.0), before=before)).spans == part.spans[2:]
    assert judge(part, chunk, known(*spoken, num_sent=2)).spans == part.spans
    assert judge(part, chunk, known()).spans == part.spans, "the detector finds no speech at all"


@pytest.mark.parametrize(("digits", "is_long"), [("6126", True), ("456", False)])
def test_sentences_of_twelve_letters_are_watched_for(digits: str, is_long: bool) -> None:
    """People say shorter ones twice."""
    span = Span(0.0, 1.0, words(digits), (LIKELY,) * len(digits))
    assert bool(sentences_of([DecodedPart(0.0, 8.0, say(), (span,), 9)], TOKENIZER)) == is_long


@pytest.mark.parametrize(("duration_s", "tail_s"), [(6.25, 6.0), (6.18, None)])
def test_a_part_ends_before_what_repeats_its_prompt_if_a_word_has_room_there(
    duration_s: float, tail_s: float | None
) -> None:
    part, chunk = sentences((0, 2), (6, duration_s), duration_s=duration_s)
    other = msgspec.structs.replace(part.spans[0], tokens=OTHER, end_s=6.0)
    part = msgspec.structs.replace(part, spans=(other, part.spans[1]))
    prompt = {letters_of(part.spans[1], TOKENIZER)}
    found = judge(part, chunk, known((0.0, 2.0), prompt=prompt))
    assert (found.spans, found.tail_s, found.reason) == ((other,), tail_s, "prompt_repeated")
    assert not may_leave(part, chunk, known(prompt=prompt))


# -- Speech without text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("certain_s", "tail_s"),
    [
        ([(4.2, 5.0)], 3.9),  # behind a pause of a second
        ([(3.2, 4.0)], None),  # a time may be off by that
        ([(9.5, 11.0)], None),
    ],
)
def test_speech_in_a_gap_is_read_again(certain_s: list[Interval], tail_s: float | None) -> None:
    part, chunk = part_of((0.0, 3.0, LIKELY), (8.0, 11.5, LIKELY))
    found = judge(part, chunk, known(*certain_s))
    assert found.tail_s == (None if tail_s is None else pytest.approx(tail_s, abs=0.011))
    assert may_leave(part, chunk, known(*certain_s, may_complete=False)) == (tail_s is None)


def test_speech_before_the_unread_tail_and_in_a_part_without_text_is_read_again() -> None:
    part, chunk = part_of((0.0, 3.0, LIKELY))
    part = msgspec.structs.replace(part, tail_s=9.0)
    assert judge(part, chunk, known((5.0, 6.0))).tail_s == pytest.approx(4.7)
    assert judge(part, chunk, known((10.0, 11.0))).tail_s == 9.0
    empty, chunk = part_of()
    assert judge(empty, chunk, known((5.0, 6.0))).tail_s == pytest.approx(4.7)


def spoken_words(*certain_s: Interval, words_s: Interval = (6.0, 9.0), **other: Any) -> DecodedPart:
    """The verdict on a segment of 12 s and five words of 12 letters in `words_s`."""
    result = timed(spell(5 * f" {'x' * 12}"), *words_s, 12.0)
    part = decode_part(CHUNK, result, DecodingOptions(language="en", word_timestamps=True), TOKENIZER)
    return judge(part, CHUNK, known(*certain_s, **other))


@pytest.mark.parametrize(
    ("certain_s", "words_s", "verdict"),
    [
        ([(2.0, 2.6), (6.0, 9.0)], (6.0, 9.0), (0, 1.7, 2.6)),  # up to the pause, then the rest
        ([(2.0, 2.46875), (6.0, 9.0)], (6.0, 9.0), None),
        ([(0.0, 0.6), (2.0, 9.0)], (2.0, 9.0), (0, 0.0, 1.3)),
        ([(1.0, 2.0), (2.5, 3.0), (3.5, 3.6), (6.0, 9.0)], (6.0, 9.0), (0, 0.7, 4.1)),  # runs together
        ([(1.0, 3.0), (9.0, 11.0)], (1.0, 3.0), (1, 8.7, None)),
        ([(2.0, 9.0)], (2.0, 9.0), None),  # people speak slowly
    ],
)
def test_half_a_second_of_certain_speech_without_a_word_is_read_again(
    certain_s: list[Interval], words_s: Interval, verdict: tuple[int, float, float | None] | None
) -> None:
    found = spoken_words(*certain_s, words_s=words_s)
    assert spoken_words(*certain_s, words_s=words_s, may_complete=False).spans, "there is no further part"
    assert spoken_words(*certain_s, words_s=words_s, num_sent=1).spans, "what was sent stands"
    if verdict is None:
        assert (len(found.spans), found.tail_s) == (1, None)
        return
    num_kept, tail_s, split_s = verdict
    assert (len(found.spans), found.reason) == (num_kept, "speech_passed_over")
    assert found.tail_s == pytest.approx(tail_s, abs=0.015)
    assert found.split_s == (None if split_s is None else pytest.approx(split_s, abs=0.015))


def test_what_has_neither_text_nor_certain_speech_is_not_read_again() -> None:
    part, chunk = part_of((0.2, 1.0, LIKELY))
    said = msgspec.structs.replace(part, spans=(msgspec.structs.replace(part.spans[0], words=(WORD,)),))
    both = known((1.8, 2.5), (6.0, 9.0)).heard
    first = Known(msgspec.structs.replace(both, certain_s=both.certain_s[:1]), TOKENIZER)
    parted = [approx(1.5, 4.25), approx(4.25, 12.0)]
    assert again_s(judge(said, chunk, Known(both, TOKENIZER)), chunk) == parted
    assert again_s(judge(said, chunk, first), chunk) == parted[:1]
    unread = msgspec.structs.replace(said, tail_s=9.5)
    assert again_s(judge(unread, chunk, first), chunk) == parted


def again_s(part: DecodedPart, chunk: Chunk) -> list[Interval]:
    """What is read again, by the clock of the part."""
    starts_s = [(each.start_s - START_S, each.duration_s) for each in segments.unread(chunk, part)]
    return [(start_s, start_s + duration_s) for start_s, duration_s in starts_s]


def approx(start_s: float, end_s: float) -> Any:
    return pytest.approx((start_s, end_s), abs=0.015)


def test_speech_that_was_read_again_without_a_text_is_given_up() -> None:
    part, chunk = part_of((0.0, 2.0, UNLIKELY), no_speech_prob=0.6)
    spoken = (4.0, 6.0)
    assert judge(part, chunk, known(spoken)).tail_s is not None
    assert judge(part, chunk, known(spoken, is_again=True)).tail_s is None
    text, _ = part_of((0.0, 2.0, LIKELY))
    assert judge(text, chunk, known(spoken, is_again=True)).tail_s is not None


def test_one_word_does_not_fill_four_seconds() -> None:
    assert spoken_words((1.0, 5.0), (5.5, 9.0), words_s=(4.0, 9.0)).tail_s is not None


@pytest.mark.parametrize(
    ("text", "leaves"), [("x" * 32, True), ("x" * 31, False), ("1" * 11, True), ("你" * 10, False)]
)
def test_a_segment_with_less_text_than_its_speech_fills_waits_for_its_words(text: str, leaves: bool) -> None:
    """Five seconds, which 35 letters may fill; digits and Chinese characters take as long as three."""
    for start_s in (0, 4.2):  # speech before a segment is its own: times may be off
        said = say(t(start_s), *spell(text), t(12))
        early = decode_part(CHUNK, said, DecodingOptions(language="en"), TOKENIZER)
        assert may_leave(early, CHUNK, known((0.5, 3.5), (4.4, 6.4))) == leaves
        assert may_leave(early, CHUNK, known((0.5, 3.5), (4.4, 6.4), may_complete=False))


# -- For whatever a model writes -----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_may_leave_early_stands_and_no_audio_is_read_twice(data: st.DataObject) -> None:
    times = sorted(data.draw(st.lists(st.integers(0, 300), min_size=2, max_size=9, unique=True)))
    tokens: list[int] = []
    for start, end in zip(times[::2], times[1::2], strict=False):
        text = data.draw(st.sampled_from([SENTENCE, OTHER, words("1"), spell(" so it goes on and on")]))
        tokens += [t(start * 0.04), *text, t(end * 0.04)]
    logprob = data.draw(st.sampled_from([-0.1, -0.7]))
    edges = sorted(data.draw(st.lists(st.integers(0, 120), max_size=12, unique=True)))
    certain_s = joined([(a / 10, b / 10) for a, b in zip(edges[::2], edges[1::2], strict=False)])
    options = DecodingOptions(language="en")
    part = decode_part(CHUNK, say(*tokens, avg_logprob=logprob), options, TOKENIZER)
    given_ = known(*certain_s, prompt=data.draw(st.sampled_from([set(), {"threeonefourone"}])))
    num_early = data.draw(st.integers(0, len(part.spans)))
    early = msgspec.structs.replace(part, spans=part.spans[:num_early])
    if may_leave(early, CHUNK, given_):
        found = judge(part, CHUNK, given_)
        assert found.spans[:num_early] == early.spans or not found.spans[:num_early]
        assert (
            judge(part, CHUNK, msgspec.structs.replace(given_, num_sent=num_early)).spans[:num_early]
            == early.spans
        )
    found = judge(part, CHUNK, given_)
    assert found.tail_s is None or all(span.end_s <= found.tail_s + 1e-9 for span in found.spans)
    assert all(not START_S + (found.tail_s or 99) <= each.start_s for each in found.dropped)
