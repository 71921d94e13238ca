import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_server.api.request import parse_fields, split_unknown
from asr_server.api.schemas import ARRAY_FIELDS, AudioFields, TranscriptionFields, TranslationFields
from asr_server.errors import InvalidValue

MODEL = ("model", "whisper-1")
FLOATS = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature")
NAMES = [*sorted(TranscriptionFields.model_fields), "include[]", "chunking_strategy[type]", "languages[0]"]


def parse(*pairs: tuple[str, str]) -> TranscriptionFields:
    return parse_fields([MODEL, *pairs], TranscriptionFields)


def refusal(*pairs: tuple[str, str], fields_type: type[AudioFields] = TranscriptionFields) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        parse_fields(pairs, fields_type)
    return caught.value


def test_the_model_alone_is_enough() -> None:
    fields = parse()
    assert (fields.model, fields.response_format, fields.temperature, fields.stream) == (
        "whisper-1",
        "json",
        0.0,
        False,
    )


@pytest.mark.parametrize(
    "pairs",
    [
        [("timestamp_granularities[]", "segment"), ("timestamp_granularities[]", "segment")],
        [("timestamp_granularities", "segment"), ("timestamp_granularities", "segment")],
        [("timestamp_granularities", "segment, segment")],
        [("timestamp_granularities[0]", "segment"), ("timestamp_granularities[1]", "segment")],
        [("timestamp_granularities", '["segment", "segment"]')],
        [("timestamp_granularities[]", '["segment"]'), ("timestamp_granularities[]", "segment")],
    ],
)
def test_arrays_come_repeated_with_brackets_or_without_or_as_a_comma_list_or_as_json(
    pairs: list[tuple[str, str]],
) -> None:
    fields = parse(("response_format", "verbose_json"), *pairs)
    assert fields.timestamp_granularities == ["segment", "segment"]


@pytest.mark.parametrize("name", ["keywords", "keywords[]"])
def test_an_entry_of_a_json_array_may_have_a_comma(name: str) -> None:
    assert parse((name, '["Ada, Countess", "Babbage"]')).keywords == ["Ada, Countess", "Babbage"]
    assert parse((name, "Ada"), (name, "[Babbage]")).keywords == ["Ada", "[Babbage]"]


def test_a_language_of_auto_goes_with_candidates() -> None:
    assert parse(("language", "Auto"), ("languages[]", "de")).languages == ["de"]


def test_unknown_fields_are_told_from_those_that_are_refused_by_name() -> None:
    pairs = [MODEL, ("beam_size", "5"), ("keywords[]", "a"), ("known_speaker_names[]", "b"), ("x[y]", "1")]
    known, unknown = split_unknown([*pairs, ("beam_size", "6")], TranscriptionFields)
    assert known == [pairs[0], pairs[2], pairs[3]]
    assert unknown == ("beam_size", "x[y]")
    assert split_unknown([("languages", "de")], TranslationFields) == ([], ("languages",))


def test_the_refusal_of_an_unknown_field_names_the_setting() -> None:
    assert "--unknown-fields" in refusal(MODEL, ("beam_size", "5")).message


@pytest.mark.parametrize("name", ["keywords", "known_speaker_names"])
def test_a_field_with_brackets_is_one_entry_be_there_a_comma_in_it(name: str) -> None:
    pairs = [MODEL, ("channels", "split"), (f"{name}[]", "Doe, Jane"), (f"{name}[]", "Roe, John")]
    assert getattr(parse_fields(pairs, TranscriptionFields), name) == ["Doe, Jane", "Roe, John"]


def test_an_unknown_list_is_refused_as_unknown_not_as_repeated() -> None:
    assert "Unknown field 'tags[]'" in refusal(MODEL, ("tags[]", "a"), ("tags[]", "b")).message


@pytest.mark.parametrize(("text", "value"), [("true", True), ("True", True), ("1", True), ("false", False)])
def test_booleans_come_as_text(text: str, value: bool) -> None:
    assert parse(("stream", text)).stream is value


def test_numbers_come_as_text() -> None:
    fields = parse(("temperature", "0.4"), ("seed", "7"), ("max_completion_tokens", "12"))
    assert (fields.temperature, fields.seed, fields.max_completion_tokens) == (0.4, 7, 12)


def test_an_empty_field_is_an_absent_one() -> None:
    assert parse(("language", ""), ("temperature", " "), ("prompt", "")).language == ""


@pytest.mark.parametrize(
    "pairs",
    [
        [("chunking_strategy", '{"type": "server_vad", "threshold": 0.7}')],
        [("chunking_strategy[type]", "server_vad"), ("chunking_strategy[threshold]", "0.7")],
    ],
)
def test_a_chunking_strategy_comes_as_json_or_flattened(pairs: list[tuple[str, str]]) -> None:
    chunking = parse(*pairs).chunking_strategy
    assert chunking is not None
    assert (chunking.type, chunking.threshold, chunking.prefix_padding_ms) == ("server_vad", 0.7, 300)


@pytest.mark.parametrize("text", ["auto", '"auto"'])
def test_a_chunking_strategy_comes_as_the_word_auto(text: str) -> None:
    chunking = parse(("chunking_strategy", text)).chunking_strategy
    assert chunking is not None
    assert chunking.type == "auto"


@pytest.mark.parametrize(
    ("pairs", "param"),
    [
        ([("temprature", "0")], "temprature"),
        ([("temperature", "1.01")], "temperature"),
        ([("temperature", "-0.1")], "temperature"),
        ([("temperature", "nan")], "temperature"),
        ([("temperature", "warm")], "temperature"),
        ([("stream", "maybe")], "stream"),
        ([("seed", "1.5")], "seed"),
        ([("seed", str(2**63))], "seed"),
        ([("top_p", "0")], "top_p"),
        ([("top_k", "-2")], "top_k"),
        ([("min_p", "2")], "min_p"),
        ([("repetition_penalty", "0")], "repetition_penalty"),
        ([("frequency_penalty", "3")], "frequency_penalty"),
        ([("presence_penalty", "-3")], "presence_penalty"),
        ([("max_completion_tokens", "0")], "max_completion_tokens"),
        ([("response_format", "xml")], "response_format"),
        ([("known_speaker_names[]", "Ann")], "known_speaker_names[]"),
        ([("known_speaker_references[]", "data:,")], "known_speaker_references[]"),
        ([("include[]", "tokens")], "include[]"),
        ([("diarize", "true"), ("stream_include_segments", "true")], "stream_include_segments"),
        ([("num_speakers", "2")], "num_speakers"),
        ([("num_speakers", "2"), ("stream", "true")], "num_speakers"),
        ([("stream_continuous_usage_stats", "true")], "stream_continuous_usage_stats"),
        ([("keywords", "[1]")], "keywords[]"),
        ([("keywords", '["a", ["b"]]')], "keywords[]"),
        ([("include[]", "logprobs"), ("response_format", "text")], "include[]"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities[]"),
        (
            [("timestamp_granularities[]", "segment"), ("response_format", "text")],
            "timestamp_granularities[]",
        ),
        ([("keywords[]", "<b>")], "keywords[]"),
        ([("keywords[]", "two\nlines")], "keywords[]"),
        ([("subtitles", "fancy"), ("response_format", "srt")], "subtitles"),
        (
            [("timestamp_granularities[]", "line"), ("response_format", "verbose_json")],
            "timestamp_granularities[]",
        ),
        (
            [("timestamp_granularities[]", "word"), ("response_format", "json")],
            "timestamp_granularities[]",
        ),
        ([("max_line_width", "0"), ("response_format", "srt")], "max_line_width"),
        ([("max_line_width", "20"), ("response_format", "json")], "max_line_width"),
        ([("max_words_per_line", "3")], "max_words_per_line"),
        ([("highlight_words", "true"), ("response_format", "text")], "highlight_words"),
        ([("max_line_count", "2"), ("response_format", "vtt")], "max_line_count"),
        ([("stream", "true"), ("response_format", "srt")], "stream"),
        ([("stream", "true"), ("response_format", "vtt")], "stream"),
        ([("chunking_strategy", "manual")], "chunking_strategy"),
        ([("chunking_strategy", "{")], "chunking_strategy"),
        ([("chunking_strategy", "[1]")], "chunking_strategy"),
        ([("chunking_strategy", '{"type": "server_vad", "threshold": 2}')], "chunking_strategy"),
        ([("chunking_strategy[type]", "auto"), ("chunking_strategy[shape]", "x")], "chunking_strategy"),
        ([("chunking_strategy", '{"type": "auto", "threshold": 0.7}')], "chunking_strategy"),
        ([("language", "en"), ("languages[]", "de")], "languages[]"),
        ([("language", "en"), ("multilingual", "true")], "multilingual"),
        ([("language", "en"), ("language", "de")], "language"),
        ([("model[]", "whisper-1")], "model[]"),
        ([("to_language", "en")], "to_language"),
        ([("a[b][c]", "1")], "a[b][c]"),
        ([("chunking_strategy", "[" * 60_000)], "chunking_strategy"),
        ([("seed", "9" * 60_000)], "seed"),
        *[([(field, '["\\ud800"]')], f"{field}[]") for field in sorted(ARRAY_FIELDS)],
        ([("chunking_strategy", '{"type": "\\ud800"}')], "chunking_strategy"),
        ([("languages[]", "en," * 1024)], "languages[]"),
        ([("languages[]", "en," * 500)] * 3, "languages[]"),
        ([("keywords", "[" + '"a",' * 1024 + '"a"]')], "keywords[]"),
        ([("keywords[]", "a")] * 1025, "keywords[]"),
        *[([(field, "nan")], field) for field in FLOATS],
        *[([(field, "inf")], field) for field in FLOATS],
        *[([(field, "-inf")], field) for field in FLOATS],
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(pairs: list[tuple[str, str]], param: str) -> None:
    error = refusal(MODEL, *pairs)
    assert error.param == param
    assert param.split("[")[0] in error.message


@pytest.mark.slow
@given(pairs=st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=20), st.text(max_size=20))))
@settings(max_examples=300, deadline=None)
def test_nothing_that_is_sent_brings_anything_but_fields_or_a_refusal(pairs: list[tuple[str, str]]) -> None:
    with contextlib.suppress(InvalidValue):
        assert parse(*pairs).model == "whisper-1"


def test_segments_are_taken_beside_json_as_vercels_sdk_sends_them() -> None:
    assert parse(("timestamp_granularities[]", "segment")).response_format == "json"


def test_a_stream_of_verbose_json_is_one_whole_reply_as_litellm_expects() -> None:
    assert not parse(("stream", "true"), ("response_format", "verbose_json")).is_streamed
    assert parse(("stream", "true")).is_streamed


def test_the_model_may_be_left_out() -> None:
    assert parse_fields([("temperature", "0")], TranscriptionFields).model == ""


def test_a_refusal_repeats_no_more_than_a_line_of_what_was_sent() -> None:
    wrong = refusal(MODEL, ("temperature", "x" * 10_000)).message
    assert wrong.startswith(f"Invalid value for 'temperature': '{'x' * 80}'. ")
    assert len(wrong) < 300
    unknown = refusal(MODEL, ("x" * 10_000, "1")).message
    assert unknown.startswith(f"Unknown field '{'x' * 80}'. --unknown-fields")
    assert len(unknown) < 300


def test_a_translation_takes_the_language_spoken_and_no_candidates() -> None:
    fields = parse_fields([MODEL, ("language", "de"), ("hotwords", "Ada")], TranslationFields)
    assert (fields.language, fields.hotwords) == ("de", "Ada")
    assert refusal(MODEL, ("languages[]", "de"), fields_type=TranslationFields).param == "languages[]"


HARMLESS = [
    *(("use_beam_search", "false"), ("use_beam_search", "true"), ("n", "1"), ("length_penalty", "1.0")),
    *(("include_stop_str_in_output", "False"), ("vllm_xargs", "{}"), ("seed", "0"), ("top_k", "0")),
    *(("stream_include_usage", "false"), ("stream_continuous_usage_stats", "false")),
    *(("vad_filter", "false"), ("vad_filter", "true"), ("diarization", "false")),
    *(("without_timestamps", "true"), ("without_timestamps", "false")),
]


@pytest.mark.parametrize("fields_type", [TranscriptionFields, TranslationFields])
@pytest.mark.parametrize("pair", HARMLESS)
def test_fields_of_other_servers_are_taken_with_values_that_change_nothing(
    pair: tuple[str, str], fields_type: type[AudioFields]
) -> None:
    assert parse_fields([MODEL, pair], fields_type).model == "whisper-1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", "2"), ("length_penalty", "0.6"), ("include_stop_str_in_output", "true")),
        *(("vllm_xargs", '{"a": 1}'), ("diarization", "true"), ("use_beam_search", "5")),
    ],
)
def test_fields_of_other_servers_are_refused_with_values_that_would_change_the_text(
    name: str, value: str
) -> None:
    error = refusal(MODEL, (name, value))
    assert (error.param, f"'{name}'" in error.message) == (name, True)


@pytest.mark.parametrize("response_format", ["json", "text"])
def test_references_without_a_format_that_shows_speakers_are_taken(response_format: str) -> None:
    pairs = [("known_speaker_names[]", "Ann"), ("known_speaker_references[]", "data:audio/wav;base64,AA==")]
    assert parse(("response_format", response_format), *pairs).known_speaker_names == ["Ann"]
    assert refusal(MODEL, *pairs, ("diarize", "true")).param == "diarize"
