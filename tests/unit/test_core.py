"""The shared types: what a request is decoded with where it asks for nothing, and what follows from them."""

import pytest

from asr_server.core import ChunkResult, DecodingOptions, temperatures_for


def result(avg_logprob: float, no_speech_prob: float) -> ChunkResult:
    return ChunkResult((), (), avg_logprob, no_speech_prob, 1.0, 0.0, "en", "stop")


@pytest.mark.parametrize(
    ("avg_logprob", "no_speech_prob", "is_silence"),
    [(-1.01, 0.61, True), (-1.0, 0.61, False), (-1.01, 0.6, False), (-0.5, 0.9, False), (-2.0, 0.1, False)],
)
def test_a_chunk_is_silence_where_its_text_is_unlikely_and_so_is_speech(
    avg_logprob: float, no_speech_prob: float, is_silence: bool
) -> None:
    assert result(avg_logprob, no_speech_prob).is_silence(DecodingOptions()) is is_silence


@pytest.mark.parametrize(
    ("temperature", "temperatures"),
    [(0.0, (0.0, 0.2)), (0.0009, (0.0, 0.2)), (0.001, (0.001,)), (0.7, (0.7,))],
)
def test_one_temperature_is_tried_unless_near_0(temperature: float, temperatures: tuple[float, ...]) -> None:
    assert temperatures_for(temperature, (0.0, 0.2)) == temperatures
