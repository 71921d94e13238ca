"""The shared types: what a request is decoded with where it asks for nothing, and what follows from them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from asr_server.core import (
    Chunk,
    ChunkId,
    ChunkResult,
    DecodingOptions,
    Segment,
    Track,
    Transcript,
    Word,
    temperatures_for,
)


def result(avg_logprob: float, no_speech_prob: float) -> ChunkResult:
    return ChunkResult((), (), avg_logprob, no_speech_prob, 1.0, 0.0, "en", "stop")


def segment(*words: Word) -> Segment:
    return Segment(0, 0, 0.0, 1.0, "", (), 0.0, 0.0, 0.0, 0.0, words=words)


def test_without_a_wish_all_extras_are_off_and_thresholds_are_openai_whispers() -> None:
    options = msgspec.structs.asdict(DecodingOptions())
    on = {name for name, value in options.items() if value is True}
    assert on == set()
    numbers = {name: value for name, value in options.items() if type(value) in (int, float)}
    assert numbers == {
        "compression_ratio_threshold": 2.4,
        "logprob_threshold": -1.0,
        "no_speech_threshold": 0.6,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 0,
    }
    assert options["temperatures"] == (0.0,)
    assert options["task"] == "transcribe"
    assert {name for name, value in options.items() if value is None} == {"language", "max_new_tokens"}


def test_times_of_a_chunk_are_in_seconds_of_16_000_samples() -> None:
    chunk = Chunk(0, 24_000, np.zeros(8_000, np.float32))
    assert (chunk.start_s, chunk.duration_s, chunk.channel) == (1.5, 0.5, 0)


def test_a_chunk_is_tried_as_a_whole_first() -> None:
    assert ChunkId("a", 3) == ChunkId("a", 3, part=0, attempt=0)


@pytest.mark.parametrize(
    ("avg_logprob", "no_speech_prob", "is_silence"),
    [(-1.01, 0.61, True), (-1.0, 0.61, False), (-1.01, 0.6, False), (-0.5, 0.9, False), (-2.0, 0.1, False)],
)
def test_a_chunk_is_silence_where_its_text_is_unlikely_and_so_is_speech(
    avg_logprob: float, no_speech_prob: float, is_silence: bool
) -> None:
    assert result(avg_logprob, no_speech_prob).is_silence(DecodingOptions()) is is_silence


def test_a_result_has_no_fallbacks_nor_word_times_unless_it_says_so() -> None:
    plain = result(0.0, 0.0)
    assert (plain.num_fallbacks, plain.token_times_s, plain.token_peaks_s, plain.pauses_s) == (0, (), (), ())


@pytest.mark.parametrize(
    ("temperature", "temperatures"),
    [(0.0, (0.0, 0.2)), (0.0009, (0.0, 0.2)), (0.001, (0.001,)), (0.7, (0.7,))],
)
def test_a_temperature_is_the_only_one_unless_it_is_next_to_0(
    temperature: float, temperatures: tuple[float, ...]
) -> None:
    assert temperatures_for(temperature, (0.0, 0.2)) == temperatures


def test_the_words_of_a_transcript_are_those_of_its_segments() -> None:
    one, two, three = (Word(text, 0.0, 1.0) for text in ("one", "two", "three"))
    transcript = Transcript("", (segment(one, two), segment(), segment(three)), (), "english", 1.0, 0, 0)
    assert transcript.words == (one, two, three)
    assert not transcript.is_cut_short


def test_a_track_is_neither_the_default_nor_an_extra_unless_it_says_so() -> None:
    track = Track(1)
    assert (track.is_default, track.is_extra) == (False, False)
