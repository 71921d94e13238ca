"""Which texts are tried again at a higher temperature, at the edge of each of Whisper's thresholds."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import (
    compression_ratio,
    is_broken,
    needs_fallback,
    repeats_a_little,
)


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
    assert needs_fallback(tried, DecodingOptions()) is is_tried_again


def test_a_sentence_that_is_said_twice_is_no_loop() -> None:
    sentence = " I would like to thank the chairman for his very kind words."
    twice, thrice, five_times = (result(ratio=compression_ratio(sentence * count)) for count in (2, 3, 5))
    assert [repeats_a_little(each) for each in (twice, thrice, five_times)] == [True, True, False]
    assert [repeats_a_little(result(ratio=ratio)) for ratio in (3.5, 3.51)] == [True, False]
    assert not repeats_a_little(result(ratio=2.5, finish_reason="length"))


def test_a_likelihood_that_is_no_number_or_no_logarithm_of_one_is_broken() -> None:
    assert [is_broken(result(each)) for each in (math.nan, math.inf, 1.01)] == [True] * 3
    assert [is_broken(result(each)) for each in (1.0, 0.0, -1e9, -math.inf)] == [False] * 4
