"""Which of several tries at a chunk is kept, and when a try is ended."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle
from typing import Literal

import numpy as np
import pytest
from msgspec import structs

from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import TEMPERATURE_LADDER, AudioWindow, ChunkId, ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk, compression_ratio, is_broken, repeats_a_little
from asr_server.engine.config import check_timestamps
from tests.support.checkpoints import short_window_directory
from tests.support.tokens import make_tokenizer, words

FLUENT, SAID_TWICE, REPETITIVE = 1.0, 2.6, 5.0
CUT_SHORT = 3.29  # a loop that was ended early; it has no end of its own
END_OF_TEXT = 7


def climb(tries: list[tuple[float, float]]) -> tuple[int, float]:
    """The number of tries made, and the temperature of the one kept. A try: log-probability, compression."""
    options = DecodingOptions(temperatures=TEMPERATURE_LADDER)
    sequence = ActiveChunk(ChunkId("a", 0), np.zeros(160, np.float32), options, "en")
    for number, (logprob, ratio) in enumerate(tries, 1):
        sequence.tokens = [number]
        reason: Literal["stop", "length"] = "length" if ratio == CUT_SHORT else "stop"
        result = ChunkResult((number,), (logprob,), logprob, 0.0, ratio, sequence.temperature, "en", reason)
        if not sequence.next_try(result):
            kept = sequence.best_result(result)
            return number, kept.temperature
    raise AssertionError("it wants to climb further")


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ([(-0.3, FLUENT)], (1, 0.0)),
        ([(-1.2, FLUENT), (-0.9, FLUENT)], (2, 0.2)),  # the first that is plausible
        ([(-1.1, FLUENT), (-1.3, FLUENT), (-2.0, FLUENT)], (3, 0.0)),  # none is: the likeliest
        ([(-1.6, FLUENT), (-1.4, FLUENT), (-1.5, FLUENT)], (3, 0.2)),
        ([(-0.1, REPETITIVE), (-1.8, FLUENT), (-1.9, FLUENT)], (3, 0.2)),  # of those that do not repeat
        ([(-0.1, REPETITIVE)] * 4 + [(-3.0, FLUENT)], (5, 0.8)),
        ([(-0.2, REPETITIVE), (-0.1, REPETITIVE)] + [(-0.3, REPETITIVE)] * 4, (6, 0.2)),
        ([(-0.2, SAID_TWICE), (-0.9, FLUENT)], (2, 0.2)),
        ([(-0.2, SAID_TWICE), (-1.0, FLUENT)], (2, 0.2)),  # just plausible
        ([(-0.2, SAID_TWICE)] * 5 + [(-4.2, FLUENT)], (6, 0.0)),  # nothing else is plausible
        ([(-0.1, REPETITIVE), (-0.2, SAID_TWICE)] + [(-4.2, FLUENT)] * 4, (3, 0.2)),
        ([(-1.2, FLUENT), (-0.6, CUT_SHORT), (-1.3, FLUENT)], (3, 0.0)),
        ([(-0.1, CUT_SHORT), (-0.5, REPETITIVE)] * 3, (6, 0.0)),  # nothing else: the likeliest
    ],
)
def test_where_no_try_is_plausible_the_likeliest_that_does_not_repeat_itself_is_kept(
    tries: list[tuple[float, float]], expected: tuple[int, float]
) -> None:
    assert climb(tries) == expected


LADDER = DecodingOptions(temperatures=(0.0, 0.2))
TENTATIVE = DecodingOptions(is_tentative=True)
DRAWN = DecodingOptions(temperatures=(0.4,))


def said_until_it_is_ended(options: DecodingOptions, duration_s: int, before: Sequence[int] = ()) -> int:
    tokenizer, samples = make_tokenizer(), np.zeros(duration_s * 16_000, np.float32)
    sequence = ActiveChunk(ChunkId("a", 0), samples, options, "en", max_tokens=448)
    for token in chain(before, cycle(words("123"))):
        reason = sequence.append(token, -0.1, tokenizer.specials.end_of_text)
        if reason or sequence.is_loop(tokenizer):
            return len(sequence.tokens)
    raise AssertionError("a cycle has no end")


@pytest.mark.parametrize(
    ("options", "duration_s", "expected"),
    [
        (DecodingOptions(), 30, 448),
        (DRAWN, 30, 168),
        (DRAWN, 2, 48),
        (LADDER, 30, 48),  # the next temperature follows
        (TENTATIVE, 30, 24),  # another text stands
    ],
)
def test_a_text_that_repeats_itself_is_ended(
    options: DecodingOptions, duration_s: int, expected: int
) -> None:
    assert said_until_it_is_ended(options, duration_s) == expected


@pytest.mark.parametrize("options", [LADDER, TENTATIVE])
def test_a_text_is_not_ended_while_it_may_pass_as_a_whole(options: DecodingOptions) -> None:
    before = np.random.default_rng(0).integers(ord("a"), ord("z"), size=200).tolist()
    assert said_until_it_is_ended(options, 30, before) == len(before) + 80
    assert said_until_it_is_ended(structs.replace(options, compression_ratio_threshold=math.inf), 30) == 448


def test_a_text_ends_where_a_segment_would_begin_behind_the_audio() -> None:
    first_time = END_OF_TEXT + 1
    samples = np.zeros(16_000 * 2 - 1, np.float32)
    sequence = ActiveChunk(ChunkId("a", 0), samples, DecodingOptions(), "en", max_tokens=448)
    sequence.end_with_audio(first_time)
    said = [first_time, 1, first_time + 99, first_time + 99, 2, first_time + 110]
    assert [sequence.append(token, -0.1, END_OF_TEXT) for token in said] == [None] * len(said)
    assert sequence.append(first_time + 100, -0.1, END_OF_TEXT) == "stop"
    assert sequence.tokens == said


def test_the_text_of_a_search_begins_with_the_segments_that_it_reported() -> None:
    """A text that ended before the second segment is likelier for its length than those that go on."""
    tokenizer = make_tokenizer()
    first_time, end = tokenizer.specials.timestamp_begin, tokenizer.specials.end_of_text
    options = DecodingOptions(early_results=True, logprob_threshold=-9.0)
    chunk = ActiveChunk(
        ChunkId("a", 0), np.zeros(64_000, np.float32), options, "en", beam_size=2, max_tokens=20
    )
    chunk.begin(end)
    assert chunk.beam is not None
    said = [first_time, *words("0"), first_time + 50, first_time + 50, *words("12"), first_time + 90]
    reports = []
    for place, token in enumerate([*said, end]):
        ends = [(end, -0.1)] if place == 3 else []
        chunk.beam.advance([[(token, -0.2 if place < 4 else -0.3), *ends]])
        if not chunk.beam.is_over and (report := chunk.next_early_result(tokenizer)) is not None:
            reports.append(report)
    result = chunk.result_of_beam(chunk.beam, tokenizer)
    assert reports[-1].tokens == tuple(said)
    assert result.tokens[: len(said)] == tuple(said)


def result(
    logprob: float = -0.5,
    no_speech: float = 0.0,
    ratio: float = 1.0,
    finish_reason: Literal["stop", "length"] = "stop",
) -> ChunkResult:
    return ChunkResult((), (), logprob, no_speech, ratio, 0.0, None, finish_reason)


@pytest.mark.parametrize(
    ("tried", "is_tried_again"),
    [
        (result(logprob=-1.0), False),
        (result(logprob=-1.01), True),
        (result(logprob=-1.01, no_speech=0.6), True),
        (result(logprob=-1.01, no_speech=0.61), False),
        (result(ratio=2.4), False),
        (result(ratio=2.41), True),
        (result(ratio=2.41, no_speech=0.9), True),
    ],
)
def test_a_text_is_tried_again_that_is_unlikely_or_repetitive_and_no_silence(
    tried: ChunkResult, is_tried_again: bool
) -> None:
    assert tried.needs_fallback(DecodingOptions()) is is_tried_again


def test_a_sentence_that_is_said_twice_is_no_loop() -> None:
    sentence = " I would like to thank the chairman for his very kind words."
    twice, thrice, five_times = (result(ratio=compression_ratio(sentence * count)) for count in (2, 3, 5))
    assert [repeats_a_little(each) for each in (twice, thrice, five_times)] == [True, True, False]
    assert [repeats_a_little(result(ratio=ratio)) for ratio in (3.5, 3.51)] == [True, False]
    assert not repeats_a_little(result(ratio=2.5, finish_reason="length"))


def test_a_likelihood_that_is_no_number_or_no_logarithm_of_one_is_broken() -> None:
    assert [is_broken(result(each)) for each in (math.nan, math.inf, 1.01)] == [True] * 3
    assert [is_broken(result(each)) for each in (1.0, 0.0, -1e9, -math.inf)] == [False] * 4


def test_timestamps_that_end_before_the_window_are_refused() -> None:
    sizes = WhisperSizes.from_directory(short_window_directory())
    specials = Tokenizer.from_directory(short_window_directory()).specials
    check_timestamps(specials, sizes)
    with pytest.raises(ValueError, match="timestamps end at 8 s, the window at 30 s"):
        check_timestamps(specials, replace(sizes, window=AudioWindow(1500)))
