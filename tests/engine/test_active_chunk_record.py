"""What the host notes of a chunk: its prompt, its tokens and figures, the bounds of what may be asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_server.channel.messages import Submit
from asr_server.core import ChunkId, ChunkResult, DecodingOptions, Samples
from asr_server.engine.active_chunk import ActiveChunk, candidates, check, check_timestamps
from asr_server.engine.boost import KeywordBoost
from asr_server.engine.ladder import compression_ratio
from tests.engine.small import SIZES, TOKENIZER, clip
from tests.vocabulary import make_tokenizer, word, words

SPECIALS = TOKENIZER.specials
END, FIRST_TIME = SPECIALS.end_of_text, SPECIALS.timestamp_begin
WINDOW = SIZES.window.num_samples
ONE_LANGUAGE = make_tokenizer(("en",)).specials


def make(samples: Samples | None = None, language: str | None = "de", **options: Any) -> ActiveChunk:
    samples = np.zeros(16_000, np.float32) if samples is None else samples
    return ActiveChunk(ChunkId("a", 0), samples, DecodingOptions(**options), language, max_tokens=20)


# -- What is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"prompt_tokens": (0, SIZES.vocabulary - 1)},
        {"temperatures": (0.0, 1.0)},
        {"task": "translate"},
        {"prompt_tokens": (5,) * 500},
    ],
)
def test_what_is_just_possible_is_taken(options: dict[str, Any]) -> None:
    chunk = make(np.zeros(WINDOW, np.float32), **options)
    check(chunk, SPECIALS, SIZES)
    assert chunk.prompt


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"prompt_tokens": (3, SIZES.vocabulary)}, "a prompt token is not in this checkpoint's vocabulary"),
        ({"prompt_tokens": (-1,)}, "a prompt token is not in this checkpoint's vocabulary"),
        ({"temperatures": ()}, "temperatures must be one or more numbers not below 0"),
        ({"temperatures": (0.0, -0.1)}, "temperatures must be one or more numbers not below 0"),
    ],
)
def test_options_beyond_their_bounds_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(make(**options), SPECIALS, SIZES)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_have_to_be_some_finite_numbers_within_the_window(bad: float) -> None:
    with pytest.raises(ValueError, match="no samples, or samples that are not finite"):
        check(make(np.array([0.0, bad], np.float32)), SPECIALS, SIZES)
    with pytest.raises(ValueError, match="no samples"):
        check(make(np.zeros(0, np.float32)), SPECIALS, SIZES)
    with pytest.raises(ValueError, match="longer than the model's window of 3 s"):
        check(make(np.zeros(WINDOW + 1, np.float32)), SPECIALS, SIZES)
    check(make(np.zeros(1, np.float32)), SPECIALS, SIZES)


def test_the_language_is_the_only_one_possible_or_has_to_be_known() -> None:
    chunk = make(language=None, candidate_languages=("xx", "de"))
    check(chunk, SPECIALS, SIZES)
    assert chunk.language == "de"
    for wanted in (("zh", "de"), ()):
        chunk = make(language=None, candidate_languages=wanted)
        check(chunk, SPECIALS, SIZES)
        assert chunk.language is None
    chunk = make(language="zh", candidate_languages=("de",))
    check(chunk, SPECIALS, SIZES)
    assert chunk.language == "zh", "the request's own"
    with pytest.raises(ValueError, match="does not know the language 'xx'"):
        check(make(language="xx"), SPECIALS, SIZES)
    chunk = make(language="xx")
    check(chunk, ONE_LANGUAGE, SIZES)
    assert chunk.language is None, "an English-only model is asked for none"
    with pytest.raises(ValueError, match="cannot translate"):
        check(make(task="translate"), ONE_LANGUAGE, SIZES)


def test_languages_to_choose_from_are_those_that_the_model_knows() -> None:
    assert candidates(DecodingOptions(candidate_languages=("zh", "xx", "en")), SPECIALS) == ["zh", "en"]
    assert candidates(DecodingOptions(candidate_languages=("xx",)), SPECIALS) == ["en", "de", "zh"]
    assert candidates(DecodingOptions(), SPECIALS) == ["en", "de", "zh"]
    assert candidates(DecodingOptions(candidate_languages=("en",)), ONE_LANGUAGE) == []


@pytest.mark.parametrize("missing", [0, 1])
def test_the_vocabulary_has_a_timestamp_for_the_windows_end(missing: int) -> None:
    sizes = replace(SIZES, vocabulary=FIRST_TIME + SIZES.audio_positions + 1 - missing)
    if missing:
        with pytest.raises(ValueError, match=r"timestamps end at 2.98 s, the window at 3 s"):
            check_timestamps(SPECIALS, sizes)
    else:
        check_timestamps(SPECIALS, sizes)


# -- Before the first token -----------------------------------------------------------------------------


def test_a_chunk_is_as_it_was_submitted() -> None:
    options = DecodingOptions(language="de")
    submitted = Submit(ChunkId("a", 3), clip(1), options)
    chunk = ActiveChunk.from_submit(submitted, 5)
    assert (chunk.id, chunk.options, chunk.language, chunk.beam_size) == (submitted.id, options, "de", 5)
    assert chunk.samples is submitted.samples
    assert (chunk.slot, ActiveChunk.from_submit(submitted).beam_size) == (-1, 1)
    chunk.slots += [4, 7]
    assert chunk.slot == 4


@pytest.mark.parametrize(("wanted", "expected"), [(None, 40), (39, 39), (40, 40), (41, 40)])
def test_a_text_is_as_long_as_it_is_wanted_or_as_there_is_room(wanted: int | None, expected: int) -> None:
    chunk = make(prompt_tokens=tuple(range(50, 59)), max_new_tokens=wanted)
    chunk.set_prompt(SPECIALS, 53)
    assert chunk.prompt[0] == SPECIALS.start_of_prev
    assert chunk.prompt[1:10] == list(range(50, 59))
    assert chunk.sot_index == 10
    assert chunk.prompt[10:] == [SPECIALS.start_of_transcript, SPECIALS.languages["de"], SPECIALS.transcribe]
    assert chunk.max_tokens == expected
    assert chunk.position == 12
    chunk.append(3, -0.1, END)
    assert chunk.position == 13


@pytest.mark.parametrize(
    ("options", "restricted", "penalised", "greedy"),
    [
        ({}, False, False, True),
        ({"top_k": 3}, True, False, True),
        ({"top_p": 0.9}, True, False, True),
        ({"min_p": 0.1}, True, False, True),
        ({"repetition_penalty": 1.1}, False, True, False),
        ({"frequency_penalty": 0.1}, False, True, False),
        ({"presence_penalty": 0.1}, False, True, False),
        ({"temperatures": (0.5,)}, False, False, False),
    ],
)
def test_options_say_how_tokens_are_chosen(
    options: dict[str, Any], restricted: bool, penalised: bool, greedy: bool
) -> None:
    chunk = make(**options)
    assert (chunk.is_restricted, chunk.is_penalised, chunk.is_greedy) == (restricted, penalised, greedy)
    chunk.beam_size = 2
    chunk.begin(END)
    assert (chunk.beam is not None) is greedy
    translated = make(task="translate", **options)
    translated.beam_size = 2
    translated.begin(END)
    assert translated.beam is None
    alone = make(**options)
    alone.begin(END)
    assert alone.beam is None


@pytest.mark.parametrize(
    ("num_samples", "steps"), [(16_000, 50), (16_001, 51), (15_999, 50), (320, 1), (1, 1)]
)
def test_the_audio_ends_at_the_next_step_of_a_timestamp(num_samples: int, steps: int) -> None:
    chunk = make(np.zeros(num_samples, np.float32))
    assert chunk.audio_end == math.inf
    chunk.end_with_audio(FIRST_TIME)
    assert chunk.audio_end == FIRST_TIME + steps


@pytest.mark.parametrize("has_words", [False, True])
def test_of_dropped_samples_the_number_is_kept_and_for_words_the_pauses(has_words: bool) -> None:
    samples = np.concatenate([clip(1), np.zeros(8_000, np.float32), clip(2)])
    chunk = make(samples, word_timestamps=has_words)
    chunk.drop_samples()
    assert (len(chunk.samples), chunk.samples.strides) == (len(samples), (0,))
    assert (len(chunk.pauses) > 0) is has_words


# -- Token by token -------------------------------------------------------------------------------------


def test_tokens_and_their_log_probabilities_are_noted_and_the_end_counts_in_their_sum() -> None:
    chunk = make()
    assert [chunk.append(token, -0.5, END) for token in (3, 4)] == [None, None]
    assert chunk.append(END, -2.0, END) == "stop"
    chunk.no_speech_prob = 0.25
    result = chunk.result("stop", TOKENIZER)
    assert (result.tokens, result.logprobs) == ((3, 4), (-0.5, -0.5))
    assert result.avg_logprob == -1.0
    assert (result.no_speech_prob, result.temperature, result.language) == (0.25, 0.0, "de")
    assert result.finish_reason == "stop"
    assert chunk.result("length", make_tokenizer(("en",))).language is None


def test_a_text_is_compressed_as_it_is_read() -> None:
    chunk = make()
    for token in (FIRST_TIME, *words("7" * 12), FIRST_TIME + 9):
        chunk.append(token, -0.1, END)
    expected = compression_ratio((" seven" * 12).strip())
    assert chunk.result("stop", TOKENIZER).compression_ratio == pytest.approx(expected)


def test_the_last_token_that_there_is_room_for_ends_the_text() -> None:
    chunk = make()
    chunk.max_tokens = 3
    assert [chunk.append(token, -0.1, END) for token in (3, 4, 5)] == [None, None, "length"]
    assert chunk.tokens == [3, 4, 5]


@pytest.mark.parametrize(("logprob", "ends"), [(math.nan, True), (1.5, True), (1.0, False), (-9.0, False)])
def test_a_log_probability_that_is_none_ends_the_text(logprob: float, ends: bool) -> None:
    chunk = make()
    assert chunk.append(3, logprob, END) == ("stop" if ends else None)
    assert chunk.tokens == ([] if ends else [3])


def test_only_behind_a_timestamp_may_a_segment_begin_behind_the_audio() -> None:
    chunk = make(np.zeros(3_200, np.float32))
    chunk.end_with_audio(FIRST_TIME)
    late = FIRST_TIME + 10
    assert chunk.append(late, -0.1, END) is None, "the first token"
    chunk.tokens[:] = [5]
    assert chunk.append(late, -0.1, END) is None, "an end"
    assert chunk.append(late - 1, -0.1, END) is None
    assert chunk.append(late, -0.1, END) == "stop"


@pytest.mark.parametrize(("period", "is_loop"), [(1, True), (16, True), (17, False)])
def test_a_text_repeats_itself_three_times_in_what_is_looked_at(period: int, is_loop: bool) -> None:
    """48 tokens of a chunk of 2 s."""
    chunk = make(np.zeros(32_000, np.float32))
    tokens = [1 + n % period for n in range(48)]
    assert chunk.is_loop(tokens, END) is is_loop
    assert not chunk.is_loop(tokens[:47], END)
    assert not chunk.is_loop([*tokens, tokens[0]], END), "looked at every 16 tokens"
    assert not chunk.is_loop([*tokens[:47], FIRST_TIME], END), "of text"
    assert chunk.is_loop([*[FIRST_TIME] * 16, *tokens], END) is is_loop


@pytest.mark.parametrize(("period", "is_loop"), [(32, True), (33, False)])
def test_what_is_repeated_has_at_most_32_tokens(period: int, is_loop: bool) -> None:
    chunk = make(np.zeros(48_000 * 10, np.float32))
    tokens = [1 + n % period for n in range(176)]
    assert chunk.is_loop(tokens, END) is is_loop
    assert not chunk.is_loop(tokens[-160:], END), "5.4 a second: 162 tokens"


# -- Keywords -------------------------------------------------------------------------------------------


BOOST = KeywordBoost([[3, 4, 5]], (), lambda token: token == 9)


def boosted(**options: Any) -> ActiveChunk:
    chunk = make(**options)
    chunk.slots[:] = [6]
    chunk.begin(END, BOOST)
    return chunk


def test_keywords_name_tokens_by_the_state_of_the_text() -> None:
    chunk = boosted()
    assert chunk.boost_rows(False) == [(6, BOOST.row(BOOST.start))]
    chunk.append(3, -0.1, END)
    begun = BOOST.step(BOOST.start, 3)
    assert chunk.boost_states == [begun]
    assert chunk.boost_rows(False) == [(6, BOOST.row(begun))]
    assert chunk.guess is None
    assert not chunk.has_guessed_wrong()


def test_behind_an_unread_token_the_state_is_guessed_and_a_wrong_guess_is_noticed() -> None:
    chunk = boosted()
    chunk.append(3, -0.1, END)
    begun = BOOST.step(BOOST.start, 3)
    assert chunk.boost_rows(True) == [(6, BOOST.row(BOOST.guess(begun)))]
    assert chunk.has_guessed_wrong(), "the token before has not come"
    chunk.append(4, -0.1, END)
    assert not chunk.has_guessed_wrong()
    assert chunk.boost_rows(True) == [(6, BOOST.row(BOOST.guess(BOOST.step(begun, 4))))]
    chunk.append(8, -0.1, END)
    assert chunk.has_guessed_wrong() is (BOOST.row(chunk.boost_state) != BOOST.row(chunk.guess or 0))
    chunk.boost_rows(False)
    assert not chunk.has_guessed_wrong(), "nothing was guessed"


@pytest.mark.parametrize("options", [{"temperatures": (0.5,)}, {"presence_penalty": 0.5}])
def test_texts_that_are_not_greedy_know_no_keywords(options: dict[str, Any]) -> None:
    assert boosted(**options).boost_rows(False) == []
    chunk = make()
    chunk.begin(END)
    assert chunk.boost_rows(True) == []
    assert not chunk.has_guessed_wrong()


# -- Segments that are told early, and further tries ------------------------------------------------------


def feed(chunk: ActiveChunk, tokens: Sequence[int], logprob: float = -0.1) -> list[ChunkResult | None]:
    found = []
    for token in tokens:
        assert chunk.append(token, logprob, END) is None
        found.append(chunk.next_early_result(TOKENIZER))
    return found


SEGMENT = (FIRST_TIME, word(3), word(4), FIRST_TIME + 20)


def test_a_segment_is_told_when_its_end_comes() -> None:
    chunk = make(early_results=True)
    *before, told = feed(chunk, SEGMENT)
    assert before == [None] * 3
    assert told is not None
    assert (told.tokens, told.finish_reason) == (SEGMENT, "length")
    assert chunk.early_result == told
    *nothing, second = feed(chunk, (FIRST_TIME + 20, word(5), FIRST_TIME + 40))
    assert nothing == [None, None]
    assert second is not None
    assert len(second.tokens) == 7
    assert feed(make(), SEGMENT) == [None] * 4, "nobody asks"


def test_a_segment_that_is_closed_at_the_start_or_unlikely_is_not_told() -> None:
    assert feed(make(early_results=True), (FIRST_TIME, word(3), FIRST_TIME)) == [None] * 3
    assert feed(make(early_results=True), (FIRST_TIME, FIRST_TIME + 3)) == [None] * 2
    unlikely = make(early_results=True)
    assert feed(unlikely, SEGMENT, logprob=-2.0) == [None] * 4
    assert unlikely.early_result is None
    repetitive = make(early_results=True, compression_ratio_threshold=0.1)
    assert feed(repetitive, SEGMENT) == [None] * 4
    assert repetitive.num_examined == 4, "nor looked at again"


def test_what_was_told_is_kept_where_the_rest_is_nothing() -> None:
    def ended(
        logprob: float, temperatures: tuple[float, ...], no_speech: float
    ) -> tuple[ActiveChunk, ChunkResult]:
        chunk = make(early_results=True, temperatures=temperatures)
        feed(chunk, SEGMENT)
        chunk.append(word(7), logprob, END)
        chunk.no_speech_prob = no_speech
        return chunk, chunk.result("stop", TOKENIZER)

    chunk, likely = ended(-0.1, (0.0, 0.2), 0.0)
    assert chunk.keep_early_result(likely) is likely
    chunk, unlikely = ended(-30.0, (0.0, 0.2), 0.0)
    early = chunk.early_result
    assert chunk.keep_early_result(unlikely) is early
    assert (tuple(chunk.tokens), len(chunk.logprobs)) == (SEGMENT, 4)
    chunk, unlikely = ended(-30.0, (0.0,), 0.0)
    assert chunk.keep_early_result(unlikely) is unlikely, "there is no further step"
    assert len(chunk.tokens) == 5
    chunk, silent = ended(-30.0, (0.0,), 0.9)
    assert chunk.keep_early_result(silent) is chunk.early_result, "silence"
    plain = make()
    assert plain.keep_early_result(unlikely) is unlikely


def test_a_further_try_begins_with_nothing_of_the_last_one() -> None:
    chunk = make(early_results=True, temperatures=(0.0, 0.2), logprob_threshold=-0.05)
    chunk.beam_size = 2
    chunk.begin(END, BOOST)
    chunk.beam = None
    feed(chunk, (*SEGMENT, 3))
    assert chunk.boost_state != BOOST.start
    assert chunk.num_examined == 4
    result = chunk.result("stop", TOKENIZER)
    assert chunk.next_try(result)
    assert (chunk.temperature, chunk.temperature_index, chunk.restarts) == (0.2, 1, 1)
    assert (chunk.tokens, chunk.logprobs, chunk.sum_logprob, chunk.num_examined) == ([], [], 0.0, 0)
    assert chunk.boost_state == BOOST.start
    assert chunk.beam is None
    second = msgspec.structs.replace(result, avg_logprob=-5.0)
    assert not chunk.next_try(second), "the ladder ends"
    assert chunk.best_result(second) is result
    assert chunk.with_fallbacks(result).num_fallbacks == 1


def test_what_was_told_or_broke_is_not_tried_again() -> None:
    told = make(early_results=True, temperatures=(0.0, 0.2), logprob_threshold=-0.15)
    feed(told, SEGMENT)
    unlikely = msgspec.structs.replace(told.result("stop", TOKENIZER), avg_logprob=-9.0)
    assert not told.next_try(unlikely)
    assert told.best_result(unlikely) is unlikely
    broken = make(temperatures=(0.0, 0.2))
    result = msgspec.structs.replace(unlikely, avg_logprob=math.nan)
    assert not broken.next_try(result)
    assert broken.best_result(result) is result
    assert broken.tries == []


@pytest.mark.parametrize(("above", "again"), [(0.4, True), (0.5, False)])
def test_unlikely_text_is_tried_again_up_to_a_temperature_and_repetitive_text_beyond(
    above: float, again: bool
) -> None:
    unlikely = ChunkResult((3,), (-2.0,), -2.0, 0.0, 1.0, 0.0, "de", "stop")
    assert make(temperatures=(0.0, above)).next_try(unlikely) is again
    repetitive = msgspec.structs.replace(unlikely, avg_logprob=-0.1, compression_ratio=9.0)
    assert make(temperatures=(0.0, above)).next_try(repetitive)
    fine = msgspec.structs.replace(unlikely, avg_logprob=-0.1)
    assert not make(temperatures=(0.0, above)).next_try(fine)


def test_times_are_from_the_slot_to_the_encoder_and_from_there_to_now() -> None:
    chunk = make()
    chunk.admitted_at, chunk.encoded_at = -3.0, -1.0
    times = chunk.times()
    assert times.encode_s == 2.0
    assert times.decode_s > 1.0
