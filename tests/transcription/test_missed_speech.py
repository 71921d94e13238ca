"""Speech that a text leaves out, between its segments and inside them, is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import Recording
from asr_server.channel.messages import Submit
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, Samples, Transcript
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.transcription import Transcriber
from asr_server.transcription.missed_speech import (
    holds_gap_with_speech,
    until_left_out,
    until_missed_speech,
    until_overlong,
)
from asr_server.transcription.segments import DecodedPart, decode_part
from asr_server.transcription.voice_check import MARGIN_S, SpokenChunk
from tests.embedded import embedded
from tests.fake_replica import FakeReplica, say, wav
from tests.memory_file import MemoryFile
from tests.speech import WORDS, silence
from tests.speech import say as speak
from tests.transcription.parts import LIKELY, TALK, TALK_S, part_of
from tests.vocabulary import at, make_tokenizer, spell, words

TOKENIZER = make_tokenizer()


def t(time_s: float) -> int:
    return at(TOKENIZER, time_s)


# -- Between segments ----------------------------------------------------------------------------------------


async def cut_at_missed_speech(part: DecodedPart, chunk: Chunk, num_sent: int = 0) -> DecodedPart | None:
    pool = PreprocessPool(1)
    try:
        return await until_missed_speech(part, chunk, pool, num_sent)
    finally:
        pool.shutdown()


GAP_TALK = np.concatenate([TALK, silence(1.5), TALK, silence(1.5), TALK])
SECOND_S, THIRD_S = TALK_S + 1.5, 2 * TALK_S + 3.0


async def test_speech_between_two_segments_is_read_again() -> None:
    part, chunk = part_of(GAP_TALK, (0.0, TALK_S, LIKELY), (THIRD_S, THIRD_S + TALK_S, LIKELY))
    cut = await cut_at_missed_speech(part, chunk)
    assert cut is not None
    assert cut.spans == part.spans[:1]
    assert cut.tail_s == pytest.approx(SECOND_S, abs=0.5)
    assert await cut_at_missed_speech(part, chunk, num_sent=2) is None, "what was sent stands"


async def test_speech_between_the_last_segment_and_the_unread_tail_is_read_again() -> None:
    part, chunk = part_of(GAP_TALK, (0.0, TALK_S, LIKELY))
    cut = await cut_at_missed_speech(msgspec.structs.replace(part, tail_s=THIRD_S), chunk)
    assert cut is not None
    assert cut.tail_s == pytest.approx(SECOND_S, abs=0.5)


async def test_much_speech_right_behind_a_segment_is_read_again_from_its_end() -> None:
    part, chunk = part_of(np.concatenate([TALK, TALK, TALK]), (0.0, TALK_S, LIKELY))
    cut = await cut_at_missed_speech(part, chunk)
    assert cut is not None
    assert cut.tail_s == pytest.approx(TALK_S, abs=1.0)


def test_a_gap_with_certain_speech_keeps_text_from_being_final() -> None:
    part, chunk = part_of(silence(12.0), (0.0, 3.0, LIKELY), (6.5, 9.0, LIKELY))

    def spoken(*certain_s: tuple[float, float]) -> SpokenChunk:
        return SpokenChunk([chunk], certain_s, certain_s)

    assert holds_gap_with_speech(part, spoken((4.2, 5.0)))
    assert not holds_gap_with_speech(part, spoken((3.2, 4.0))), "a time may be off by that"
    assert not holds_gap_with_speech(part, spoken((9.5, 11.0))), "the text goes on behind it"
    long, _ = part_of(chunk.samples, (0.0, 3.0, LIKELY), (7.5, 9.0, LIKELY))
    assert holds_gap_with_speech(long, spoken())


# -- Inside a segment, with a model that reads the second sentence only --------------------------------------

FIRST, SECOND = "314159265358", "2718"
ENGLISH = DecodingOptions(language="en", segment_times=False)
STREAMED = DecodingOptions(language="en", segment_times=False, early_results=True, streams=True)
WITH_WORDS = DecodingOptions(language="en", word_timestamps=True)


def two_sentences(pause_s: float) -> tuple[Samples, float]:
    """Both, and where the second one begins."""
    first, second = (speak(digits, "rms", gap_s=0.05, lead_s=0.0).samples for digits in (FIRST, SECOND))
    before = np.concatenate([silence(0.3), first, silence(pause_s)])
    return np.concatenate([before, second, silence(0.5)]), len(before) / SAMPLE_RATE


async def read(
    sound: Samples, options: DecodingOptions, answer: Callable[[Submit], ChunkResult]
) -> tuple[Transcript, list[Submit]]:
    replica = FakeReplica(answer)
    dispatcher, pool = Dispatcher(embedded(), replica), PreprocessPool(1)
    await dispatcher.start()
    try:
        recording = Recording(MemoryFile(wav(sound)))
        async with Transcriber(dispatcher, pool, TOKENIZER).run(recording, options) as session:
            deltas = [delta async for delta in session]
            transcript = await session.transcript()
        assert "".join(delta.text for delta in deltas) == transcript.text
        return transcript, replica.submits
    finally:
        await dispatcher.stop()
        await asyncio.to_thread(pool.shutdown)


def timed(text: Sequence[int], start_s: float, end_s: float, duration_s: float) -> ChunkResult:
    """One segment of the whole duration; its tokens share the time from `start_s` to `end_s`."""
    edges_s = np.linspace(start_s, end_s, len(text) + 1).tolist()
    result = say(t(0), *text, t(duration_s))
    return msgspec.structs.replace(
        result, token_times_s=tuple(edges_s), token_peaks_s=tuple(edge_s + 0.01 for edge_s in edges_s[:-1])
    )


def untimed(result: ChunkResult) -> ChunkResult:
    return msgspec.structs.replace(result, token_times_s=(), token_peaks_s=())


def second_alone(second_s: float) -> Callable[[Submit], ChunkResult]:
    """Read the second sentence, unless the first one stands alone."""

    def answer(submit: Submit) -> ChunkResult:
        duration_s = len(submit.samples) / SAMPLE_RATE
        if submit.id.part == 1:
            result = timed(words(FIRST), 0.3, second_s - 1.0, duration_s)
        else:
            start_s = second_s if submit.id.part == 0 else 0.3
            result = timed(words(SECOND), start_s, duration_s - 0.5, duration_s)
        return result if submit.options.word_timestamps else untimed(result)

    return answer


def spelt(digits: str) -> str:
    return " ".join(WORDS[int(digit)] for digit in digits)


@pytest.mark.parametrize("options", [ENGLISH, STREAMED, WITH_WORDS])
async def test_a_sentence_lost_before_a_pause_inside_a_segment_is_read_by_itself(
    options: DecodingOptions,
) -> None:
    sound, second_s = two_sentences(1.6)
    transcript, submits = await read(sound, options, second_alone(second_s))
    assert transcript.text == f"{spelt(FIRST)} {spelt(SECOND)}"
    whole, first, second = (len(submit.samples) for submit in submits)
    assert whole - 160 < first + second <= whole
    assert first / SAMPLE_RATE == pytest.approx(second_s - 0.8, abs=0.4), "parted within the pause"
    starts_s = [segment.start_s for segment in transcript.segments]
    assert starts_s == sorted(starts_s)


async def test_words_show_a_sentence_lost_before_a_short_pause() -> None:
    sound, second_s = two_sentences(0.6)
    transcript, submits = await read(sound, WITH_WORDS, second_alone(second_s))
    assert transcript.text == f"{spelt(FIRST)} {spelt(SECOND)}"
    assert len(submits) == 3
    transcript, submits = await read(sound, ENGLISH, second_alone(second_s))
    assert (transcript.text, len(submits)) == (spelt(SECOND), 1), "slow speech has such pauses too"


@pytest.mark.parametrize("options", [ENGLISH, WITH_WORDS])
async def test_what_a_model_leaves_out_again_is_read_no_third_time(options: DecodingOptions) -> None:
    sound, _ = two_sentences(1.6)
    sound = np.concatenate([sound, silence(1.2), sound])

    def answer(submit: Submit) -> ChunkResult:
        duration_s = len(submit.samples) / SAMPLE_RATE
        result = timed(words("2"), duration_s - 0.4, duration_s - 0.2, duration_s)
        return result if submit.options.word_timestamps else untimed(result)

    transcript, submits = await read(sound, options, answer)
    assert (transcript.text, len(submits)) == (spelt("22"), 3)


# -- By itself, on speech made up ----------------------------------------------------------------------------


def overlong(text: Sequence[int], *spoken_s: tuple[float, float], part_start_s: float = 0.0) -> bool:
    """Whether one segment of 12 s with this text leaves out some of the speech."""
    chunk = Chunk(0, round(part_start_s * SAMPLE_RATE), silence(12.0))
    part = decode_part(chunk, say(t(0), *text, t(12)), ENGLISH, TOKENIZER)
    in_file_s = [(part_start_s + start_s, part_start_s + end_s) for start_s, end_s in spoken_s]
    return until_overlong(part, chunk, SpokenChunk([chunk], in_file_s, in_file_s), TOKENIZER) is not None


@pytest.mark.parametrize("part_start_s", [0.0, 20.0])
def test_a_segment_is_overlong_if_its_letters_leave_speech_around_a_pause(part_start_s: float) -> None:
    spoken_s = (1.0, 4.0), (6.0, 8.0)  # 5 s, which 35 letters may fill
    assert overlong(spell("x" * 31), *spoken_s, part_start_s=part_start_s)
    assert not overlong(spell("x" * 32), *spoken_s, part_start_s=part_start_s)
    assert not overlong(spell("x" * 31), (1.0, 4.0), (4.5, 6.5), part_start_s=part_start_s)
    assert not overlong(spell("x" * 10), (1.0, 4.0), (6.0, 6.3), part_start_s=part_start_s)
    assert not overlong(spell("x" * 10), (1.0, 6.0), part_start_s=part_start_s), "it cannot be parted"
    assert not overlong(spell("x" * 10), part_start_s=part_start_s), "nobody has listened"


def test_digits_and_chinese_characters_take_as_long_as_three_letters() -> None:
    spoken_s = (1.0, 4.0), (6.0, 8.0)
    for text in ("1" * 11, "你" * 11):
        assert not overlong(spell(text), *spoken_s)
        assert overlong(spell(text[:10]), *spoken_s)


def left_out(
    *spoken_s: tuple[float, float], words_s: tuple[float, float] = (6.0, 9.0), num_sent: int = 0
) -> DecodedPart | None:
    """What stays of a segment of 60 letters whose five words lie in `words_s`."""
    chunk = Chunk(0, 0, silence(12.0))
    result = timed(spell(5 * f" {'x' * 12}"), *words_s, 12.0)
    part = decode_part(chunk, result, WITH_WORDS, TOKENIZER)
    return until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER, num_sent)


def check(cut: DecodedPart | None, num_kept: int, tail_s: float, split_s: float | None) -> None:
    """Check what is kept, and where the rest begins and is parted, to a frame and a half."""
    assert cut is not None
    assert len(cut.spans) == num_kept
    assert cut.tail_s == pytest.approx(tail_s, abs=0.015)
    assert cut.split_s == (None if split_s is None else pytest.approx(split_s, abs=0.015))


def test_speech_of_half_a_second_without_a_word_is_left_out() -> None:
    check(left_out((2.0, 2.6), (6.0, 9.0)), 0, 1.7, 2.6)
    assert left_out((2.0, 2.5), (6.0, 9.0)) is not None
    assert left_out((2.0, 2.46875), (6.0, 9.0)) is None
    assert left_out((2.0, 2.6), (6.0, 9.0), num_sent=1) is None, "what was sent stands"


def test_speech_at_the_very_start_without_a_word_is_left_out() -> None:
    check(left_out((0.0, 0.6), (2.0, 9.0), words_s=(2.0, 9.0)), 0, 0.0, 1.3)


def test_runs_of_speech_without_a_word_are_read_together() -> None:
    check(left_out((1.0, 2.0), (2.5, 3.0), (3.5, 3.6), (6.0, 9.0)), 0, 0.7, 4.1)


def test_speech_behind_the_last_word_is_read_from_there() -> None:
    check(left_out((1.0, 3.0), (9.0, 11.0), words_s=(1.0, 3.0)), 1, 8.7, None)


def test_one_word_does_not_fill_four_seconds() -> None:
    assert left_out((1.0, 5.0), (5.5, 9.0), words_s=(4.0, 9.0)) is not None
    assert left_out((2.0, 9.0), words_s=(2.0, 9.0)) is None, "people speak slowly"


def test_a_beginning_of_four_seconds_is_read_by_itself() -> None:
    """Read again from its start it would be the same audio."""
    part, chunk = part_of(silence(12.0), (6.0, 9.0, LIKELY))
    spoken_s = [(0.3, 4.4), (4.6, 5.0), (6.0, 9.0)]
    check(until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER), 0, 0.0, 5.5)
    later_s = [(1.0, 4.4), *spoken_s[1:]]
    assert until_left_out(part, chunk, SpokenChunk([chunk], later_s, later_s), TOKENIZER) is None
    assert until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER, 1) is None


@pytest.mark.parametrize(
    ("gap_s", "certain_s", "is_long"),
    [
        (4.0, None, True),
        (3.96875, None, False),
        (3.0, (1.0, 2.0), True),
        (3.0, (0.96, 2.0), False),
    ],
)
def test_a_gap_is_long_by_itself_or_by_speech_behind_a_pause(
    gap_s: float, certain_s: tuple[float, float] | None, is_long: bool
) -> None:
    part, chunk = part_of(silence(20.0), (0.0, 2.0, LIKELY), (2.0 + gap_s, 9.0, LIKELY))
    later = msgspec.structs.replace(part, start_s=30.0)
    spoken_s = [] if certain_s is None else [(32.0 + certain_s[0], 32.0 + certain_s[1])]
    assert holds_gap_with_speech(later, SpokenChunk([chunk], spoken_s, spoken_s)) == is_long


def overlong_cut(*spoken_s: tuple[float, float], num_sent: int = 0) -> DecodedPart | None:
    """What stays of two segments, the second of ten letters from 2 s to 12 s."""
    chunk = Chunk(0, 0, silence(12.0))
    text = say(t(0), *spell("x" * 10), t(2), t(2), *spell("x" * 10), t(12))
    part = decode_part(chunk, text, ENGLISH, TOKENIZER)
    return until_overlong(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER, num_sent)


def test_an_overlong_segment_is_parted_in_the_middle_of_its_longest_pause() -> None:
    check(overlong_cut((2.0, 4.0), (5.0, 6.0), (8.0, 10.0)), 1, 2.0, 7.0 - 2.0)
    assert overlong_cut((2.0, 4.0), (5.0, 6.0), (8.0, 10.0), num_sent=2) is None
    check(overlong_cut((2.5, 4.0), (5.0, 6.5), num_sent=1), 1, 2.0, 4.5 - 2.0)


def test_the_pause_that_parts_a_segment_has_half_a_second_of_speech_on_both_sides() -> None:
    for spoken_s, is_parted in (
        (((2.0, 2.5), (4.0, 7.0)), True),
        (((2.0, 2.46875), (4.0, 7.0)), False),
        (((2.0, 5.0), (6.0, 6.5)), True),
        (((2.0, 5.0), (6.0, 6.46875)), False),
        (((2.0, 5.0), (5.96875, 8.0)), False),
        (((2.0, 5.0), (6.0, 13.0)), True),
    ):
        assert (overlong_cut(*spoken_s) is not None) == is_parted


def test_a_word_fills_a_second_and_a_half_or_more_by_its_letters() -> None:
    """Of five words of twelve letters each fills 2.4 s."""
    for end_s, is_left_out in ((14.4, False), (14.6, True)):
        chunk = Chunk(0, 0, silence(15.0))
        part = decode_part(chunk, timed(spell(5 * f" {'x' * 12}"), 2.0, 14.8, 15.0), WITH_WORDS, TOKENIZER)
        spoken_s = [(2.0, end_s)]
        cut = until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER)
        assert (cut is not None) == is_left_out


def test_of_a_beginning_the_longest_pause_parts_it_if_it_is_three_tenths() -> None:
    part, chunk = part_of(silence(12.0), (6.0, 9.0, LIKELY))
    for gap_s, is_parted in ((0.3125, True), (0.28125, False)):
        spoken_s = [(0.0, 4.0), (4.0 + gap_s, 6.0), (6.1, 9.0)]
        cut = until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER)
        assert (cut is not None) == is_parted
        if cut is not None:
            check(cut, 0, 0.0, 4.0 + gap_s / 2)
    for end_s, is_read in ((4.0, True), (3.96875, False)):
        spoken_s = [(0.0, end_s), (6.125, 9.0)]
        cut = until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER)
        assert (cut is not None) == is_read


async def test_a_gap_shorter_than_a_pause_and_a_word_is_not_listened_to() -> None:
    """And one behind which the text was sent stands."""
    talk = np.concatenate([silence(1.0), TALK[: round(3.0 * SAMPLE_RATE)], silence(0.5)])
    part, chunk = part_of(talk, (0.0, 0.001, LIKELY), (1.1, 1.2, LIKELY))
    short = msgspec.structs.replace(part, tail_s=1.2)
    assert await cut_at_missed_speech(short, chunk) is None
    long = msgspec.structs.replace(part, spans=part.spans[:1], tail_s=4.0)
    assert await cut_at_missed_speech(long, chunk) is not None


def test_the_pause_that_parts_a_beginning_may_end_shortly_behind_the_first_segment() -> None:
    part, chunk = part_of(silence(12.0), (6.0, 9.0, LIKELY))
    for late_s, is_parted in ((MARGIN_S, True), (MARGIN_S + 1 / 32, False)):
        spoken_s = [(0.0, 4.5), (6.0 + late_s, 9.0)]
        cut = until_left_out(part, chunk, SpokenChunk([chunk], spoken_s, spoken_s), TOKENIZER)
        assert (cut is not None) == is_parted
