"""What each field is where it is left out, and between which bounds it lies."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from asr_server.api import schemas
from asr_server.api.schemas import Chunking, TranscriptionFields, TranslationFields

MAX_INT = 2**31 - 1
COMMON: dict[str, Any] = {
    **dict.fromkeys(("model", "language", "hotwords", "prompt", "track"), ""),
    "response_format": "json",
    "subtitles": "readable",
    "channels": "mix",
    "vllm_xargs": "{}",
    "stream": False,
    "stream_include_usage": True,
    "stream_continuous_usage_stats": False,
    "stream_include_segments": False,
    "condition_on_previous_text": False,
    "multilingual": False,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "vad_filter": False,
    "diarization": False,
    "without_timestamps": True,
    "known_speaker_names": [],
    "temperature": 0.0,
    "seed": 0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "n": 1,
    "length_penalty": 1.0,
    "max_completion_tokens": None,
}
OF_TRANSCRIPTIONS: dict[str, Any] = {
    **{name: [] for name in ("languages", "keywords", "timestamp_granularities", "include")},
    "known_speaker_references": [],
    "diarize": False,
    "highlight_words": False,
    **dict.fromkeys(("num_speakers", "min_speakers", "max_speakers", "max_line_width", "max_line_count")),
    **dict.fromkeys(("max_words_per_line", "chunking_strategy")),
}


def test_a_request_without_fields_asks_for_the_defaults_of_openai_and_vllm() -> None:
    assert TranscriptionFields.model_validate({}).model_dump() == COMMON | OF_TRANSCRIPTIONS
    assert TranslationFields.model_validate({}).model_dump() == COMMON | {"to_language": ""}


def is_taken(name: str, value: object, fields: type[BaseModel] = TranscriptionFields) -> bool:
    try:
        taken = fields.model_validate({name: value})
    except ValidationError:
        return False
    return bool(getattr(taken, name) == value)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *(("n", 1, 1), ("top_k", -1, MAX_INT), ("seed", -(2**63), 2**63 - 1)),
        *((name, 1, MAX_INT) for name in ("max_line_width", "max_line_count", "max_words_per_line")),
        *((name, 1, 32) for name in ("num_speakers", "min_speakers", "max_speakers")),
        ("max_completion_tokens", 1, MAX_INT),
    ],
)
def test_a_whole_number_lies_between_its_bounds(name: str, least: int, most: int) -> None:
    assert [is_taken(name, value) for value in (least - 1, least, most, most + 1)] == [
        *(False, True, True, False),
    ]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *(("temperature", 0, 1), ("min_p", 0, 1), ("length_penalty", 1, 1)),
        *(("frequency_penalty", -2, 2), ("presence_penalty", -2, 2)),
    ],
)
def test_a_number_lies_between_its_bounds(name: str, least: float, most: float) -> None:
    values = (least - 0.01, least, most, most + 0.01)
    assert [is_taken(name, value) for value in values] == [False, True, True, False]


@pytest.mark.parametrize(("name", "most"), [("top_p", 1), ("repetition_penalty", 10)])
def test_a_factor_is_above_0(name: str, most: float) -> None:
    values = (0, 0.01, most, most + 0.01)
    assert [is_taken(name, value) for value in values] == [False, True, True, False]


def test_no_number_is_infinite_or_none() -> None:
    assert not is_taken("temperature", float("nan"))
    assert not is_taken("temperature", float("inf"))


def test_names_tracks_and_references_are_bounded() -> None:
    for name, least_wrong, most in (
        ("track", "t" * 65, "t" * 64),
        ("known_speaker_names", ["n" * 65], ["n" * 64]),
        ("known_speaker_references", ["data:"] * 5, ["data:"] * 4),
    ):
        assert is_taken(name, most)
        assert not is_taken(name, least_wrong)
    assert not is_taken("known_speaker_names", ["two\nlines"])


@pytest.mark.parametrize("mark", "<>\r\n")
def test_a_keyword_has_no_mark_of_the_model_and_no_line_break(mark: str) -> None:
    assert is_taken("keywords", ["Ada, Countess of Lovelace"])
    assert not is_taken("keywords", [f"Ada{mark}"])


@pytest.mark.parametrize("name", ["diarization", "include_stop_str_in_output"])
def test_what_this_server_never_does_can_be_false_only(name: str) -> None:
    assert is_taken(name, False)
    assert not is_taken(name, True)


@pytest.mark.parametrize("name", [*COMMON, *OF_TRANSCRIPTIONS])
def test_each_field_is_described(name: str) -> None:
    assert TranscriptionFields.model_fields[name].description


def test_a_field_that_is_not_there_is_refused() -> None:
    for fields in (TranscriptionFields, TranslationFields, Chunking):
        with pytest.raises(ValidationError, match="Extra inputs"):
            fields.model_validate({"type": "auto", "beam_size": 5})


def test_a_stream_is_one_but_with_verbose_json() -> None:
    for fields, is_streamed in (
        ({}, False),
        ({"stream": True}, True),
        ({"stream": True, "response_format": "verbose_json"}, False),
    ):
        assert TranscriptionFields.model_validate(fields).is_streamed == is_streamed


@pytest.mark.parametrize(
    ("name", "values", "taken"),
    [
        ("threshold", (-0.01, 0, 1, 1.01), [False, True, True, False]),
        ("prefix_padding_ms", (-1, 0), [False, True]),
        ("silence_duration_ms", (-1, 0), [False, True]),
    ],
)
def test_a_value_of_voice_detection_lies_between_its_bounds(
    name: str, values: tuple[float, ...], taken: list[bool]
) -> None:
    for value, is_right in zip(values, taken, strict=True):
        try:
            Chunking.model_validate({"type": "server_vad", name: value})
        except ValidationError:
            assert not is_right
        else:
            assert is_right
        with pytest.raises(ValidationError, match=r"go with server_vad only|greater than|less than"):
            Chunking.model_validate({"type": "auto", name: value})


def test_json_with_half_a_surrogate_pair_is_no_text() -> None:
    assert schemas.loads('["\\ud83d\\ude00"]') == ["😀"]
    with pytest.raises(UnicodeEncodeError):
        schemas.loads('["\\ud800"]')
