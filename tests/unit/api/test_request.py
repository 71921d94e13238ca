"""What the fields of a form mean: taken in each spelling, refused by name, or options of the decoding."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_server.api.errors import FOREIGN_FIELDS
from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_fields,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.schemas import ARRAY_FIELDS, AudioFields, TranscriptionFields, TranslationFields
from asr_server.core import SpeakerCount
from asr_server.errors import InvalidValue
from tests.support.embedded import embedded
from tests.unit.api.running_app import served

MODEL = ("model", "whisper-1")
VERBOSE = ("response_format", "verbose_json")
SPLIT = ("channels", "split")
FLOATS = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature")
FIELD_NAMES = [*sorted(TranscriptionFields.model_fields), "include[]", "chunking_strategy[type]"]
MODELS = Models([served(embedded())])
TOKENIZER = MODELS.default.transcriber.tokenizer


def parse(*pairs: tuple[str, str]) -> TranscriptionFields:
    return parse_fields([MODEL, *pairs], TranscriptionFields)


def refusal(*pairs: tuple[str, str], fields_type: type[AudioFields] = TranscriptionFields) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        parse_fields(pairs, fields_type)
    return caught.value


# -- Spellings -----------------------------------------------------------------------------------------------


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
def test_arrays_come_repeated_with_brackets_as_a_comma_list_or_as_json(pairs: list[tuple[str, str]]) -> None:
    assert parse(VERBOSE, *pairs).timestamp_granularities == ["segment", "segment"]


def test_an_entry_may_have_a_comma_in_json_or_behind_a_name_with_brackets() -> None:
    assert parse(("keywords", '["Ada, Countess", "Babbage"]')).keywords == ["Ada, Countess", "Babbage"]
    assert parse(("keywords", "Ada"), ("keywords", "[Babbage]")).keywords == ["Ada", "[Babbage]"]
    names = [("known_speaker_names[]", "Doe, Jane"), ("known_speaker_names[]", "Roe, John")]
    assert parse(SPLIT, *names).known_speaker_names == ["Doe, Jane", "Roe, John"]
    assert parse(SPLIT, ("known_speaker_names", "Ann,Bob")).known_speaker_names == ["Ann", "Bob"]


@pytest.mark.parametrize(
    "pairs",
    [
        [("stream", "True"), ("temperature", "0.4"), ("max_completion_tokens", "12")],
        [("language", ""), ("temperature", " "), ("prompt", "")],  # empty: absent
        [("language", "Auto"), ("languages[]", "de")],
        [("language", "auto"), ("multilingual", "true")],
        [("timestamp_granularities[]", "segment")],  # beside json, as Vercel's SDK sends them
        [SPLIT, ("known_speaker_names[]", "Ann"), ("known_speaker_names[]", "Bob")],
        [VERBOSE, ("min_speakers", "2"), ("max_speakers", "2")],
        [("diarize", "true"), ("stream", "true"), ("stream_include_segments", "true")],
        [("stream", "true"), ("stream_include_segments", "true"), ("timestamp_granularities[]", "word")],
        [("response_format", "json"), ("max_line_width", "20")],  # a layout that nobody sees
        *([("chunking_strategy", text)] for text in ("auto", '"auto"', '{"type": "server_vad"}')),
        [("chunking_strategy[type]", "server_vad"), ("chunking_strategy[threshold]", "0.7")],
        *([("use_beam_search", value)] for value in ("false", "true")),
        [("n", "1"), ("length_penalty", "1.0"), ("include_stop_str_in_output", "False")],
        [("vllm_xargs", "{}"), ("seed", "0"), ("top_k", "-1"), ("vad_filter", "true")],
        [("diarization", "false"), ("without_timestamps", "false")],
        [("languages[]", "en," * 1023 + "en")],
        [("keywords[]", "a,b")] * 1024,
    ],
)
def test_fields_of_openai_vllm_and_speaches_are_taken(pairs: list[tuple[str, str]]) -> None:
    assert parse(*pairs).model == "whisper-1"


def test_references_are_taken_beside_formats_that_show_no_speakers() -> None:
    pairs = [("known_speaker_names[]", "Ann"), ("known_speaker_references[]", "data:audio/wav;base64,AA==")]
    assert parse(("response_format", "text"), *pairs).known_speaker_names == ["Ann"]
    assert refusal(MODEL, *pairs, ("diarize", "true")).param == "diarize"


# -- Refusals ------------------------------------------------------------------------------------------------

NAMES = [("known_speaker_names[]", "Ann"), ("known_speaker_names[]", "Bob")]
VOICES = [("known_speaker_references[]", "data:,")] * 2


@pytest.mark.parametrize(
    ("pairs", "param"),
    [
        *(([(name, value)], name) for name in FLOATS for value in ("nan", "inf", "-inf")),
        *(([("temperature", value)], "temperature") for value in ("1.01", "-0.1", "warm")),
        *(([("seed", value)], "seed") for value in ("1.5", str(2**63), "9" * 60_000)),
        ([("stream", "maybe")], "stream"),
        ([("top_p", "0")], "top_p"),
        ([("top_k", "-2")], "top_k"),
        ([("min_p", "2")], "min_p"),
        ([("repetition_penalty", "0")], "repetition_penalty"),
        ([("frequency_penalty", "3")], "frequency_penalty"),
        ([("presence_penalty", "-3")], "presence_penalty"),
        ([("max_completion_tokens", "0")], "max_completion_tokens"),
        ([("response_format", "xml")], "response_format"),
        ([("track", "t" * 65)], "track"),
        ([("include[]", "tokens")], "include[]"),
        ([("subtitles", "fancy")], "subtitles"),
        ([("max_line_width", "0"), ("response_format", "srt")], "max_line_width"),
        ([("timestamp_granularities[]", "line"), VERBOSE], "timestamp_granularities[]"),
        *(([("keywords", value)], "keywords[]") for value in ("[1]", '["a", ["b"]]', "<b>", "two\nlines")),
        *(([("num_speakers", value), VERBOSE], "num_speakers") for value in ("0", "33")),
        *(([(name, '["\\ud800"]')], f"{name}[]") for name in sorted(ARRAY_FIELDS)),
        ([("languages[]", "en," * 1024 + "en")], "languages[]"),
        ([("languages[]", "en," * 500)] * 3, "languages[]"),
        ([("keywords", "[" + '"a",' * 1024 + '"a"]')], "keywords[]"),
        ([("keywords[]", "a")] * 1025, "keywords[]"),
        ([("language", "en"), ("language", "de")], "language"),
        ([("model[]", "whisper-1")], "model[]"),
        ([("a[b][c]", "1")], "a[b][c]"),
        # of other servers, with a value that would change the text
        ([("n", "2")], "n"),
        ([("length_penalty", "0.6")], "length_penalty"),
        ([("include_stop_str_in_output", "true")], "include_stop_str_in_output"),
        ([("vllm_xargs", '{"a": 1}')], "vllm_xargs"),
        ([("diarization", "true")], "diarization"),
        # together with others
        *(([("stream", "true"), ("response_format", name)], "stream") for name in ("srt", "vtt")),
        ([("diarize", "true"), ("stream_include_segments", "true")], "stream_include_segments"),
        ([("stream_continuous_usage_stats", "true")], "stream_continuous_usage_stats"),
        ([("language", "en"), ("languages[]", "de")], "languages[]"),
        ([("language", "en"), ("multilingual", "true")], "multilingual"),
        *(
            ([("include[]", "logprobs"), other], "include[]")
            for other in (SPLIT, VERBOSE, ("response_format", "text"))
        ),
        *(
            ([("timestamp_granularities[]", kind), ("response_format", name)], "timestamp_granularities[]")
            for kind, name in (("word", "json"), ("segment", "text"))
        ),
        ([("stream", "true"), ("timestamp_granularities[]", "word")], "timestamp_granularities[]"),
        ([("max_line_count", "2"), ("response_format", "vtt")], "max_line_count"),
        ([NAMES[0]], "known_speaker_names[]"),
        ([SPLIT, NAMES[0]], "known_speaker_names[]"),
        ([SPLIT, NAMES[0], NAMES[0]], "known_speaker_names[]"),
        ([SPLIT, *NAMES, ("known_speaker_names[]", "Eve")], "known_speaker_names[]"),
        ([SPLIT, *NAMES, *VOICES], "known_speaker_references[]"),
        ([VERBOSE, *VOICES], "known_speaker_references[]"),
        ([VERBOSE, *NAMES, VOICES[0]], "known_speaker_names[]"),
        ([VERBOSE, NAMES[0], NAMES[0], *VOICES], "known_speaker_names[]"),
        ([VERBOSE, *NAMES, *VOICES * 3], "known_speaker_references[]"),
        ([SPLIT, VERBOSE, ("diarize", "true")], "diarize"),
        ([SPLIT, VERBOSE, ("max_speakers", "2")], "max_speakers"),
        ([("num_speakers", "2")], "num_speakers"),
        ([VERBOSE, ("num_speakers", "2"), ("max_speakers", "3")], "num_speakers"),
        ([VERBOSE, ("min_speakers", "3"), ("max_speakers", "2")], "min_speakers"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(pairs: list[tuple[str, str]], param: str) -> None:
    error = refusal(MODEL, *pairs)
    assert error.param == param
    assert f"'{param.split('[')[0]}" in error.message
    assert len(error.message) < 400


def test_an_unknown_field_is_refused_with_the_nearest_name_or_what_to_send_in_its_place() -> None:
    assert refusal(("temprature", "0")).message == "Unknown field 'temprature'. Did you mean 'temperature'?"
    assert refusal(("tags[]", "a"), ("tags[]", "b")).message.startswith("Unknown field 'tags[]'. ")
    assert len(refusal(("x" * 10_000, "1")).message) < 200
    for name, hint in FOREIGN_FIELDS.items():
        error = refusal((name, "1"))
        assert (error.param, error.message) == (name, f"Unknown field '{name}': {hint}.")
        assert "--" not in error.message  # a client cannot set the server's flags


@pytest.mark.slow
@given(pairs=st.lists(st.tuples(st.sampled_from(FIELD_NAMES) | st.text(max_size=20), st.text(max_size=20))))
@settings(max_examples=300, deadline=None)
def test_nothing_that_is_sent_brings_anything_but_fields_or_a_refusal(pairs: list[tuple[str, str]]) -> None:
    with contextlib.suppress(InvalidValue):
        assert parse(*pairs).model == "whisper-1"


def test_a_translation_takes_the_language_spoken_and_no_candidates() -> None:
    fields = parse_fields([MODEL, ("language", "de"), ("hotwords", "Ada")], TranslationFields)
    assert (fields.language, fields.hotwords) == ("de", "Ada")
    parse_fields([SPLIT, *NAMES], TranslationFields)
    for pairs in ([("languages[]", "de")], NAMES):
        assert refusal(MODEL, *pairs, fields_type=TranslationFields).param == pairs[0][0]


# -- Options -------------------------------------------------------------------------------------------------


def asked(*pairs: tuple[str, str], models: Models = MODELS) -> TranscriptionRequest:
    return parse_transcription_request([*pairs], models)


@pytest.mark.parametrize(
    ("pairs", "name", "value"),
    [
        ([], "temperatures", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([("temperature", "0.0009")], "temperatures", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([("temperature", "0.4")], "temperatures", (0.4,)),
        ([("top_k", "-1")], "top_k", 0),
        ([("max_completion_tokens", "12")], "max_new_tokens", 12),
        ([("seed", "5")], "seed", 5),
        ([("top_p", "0.5")], "top_p", 0.5),
        ([("min_p", "0.5")], "min_p", 0.5),
        ([("repetition_penalty", "1.5")], "repetition_penalty", 1.5),
        ([("frequency_penalty", "0.5")], "frequency_penalty", 0.5),
        ([("presence_penalty", "0.5")], "presence_penalty", 0.5),
        ([("condition_on_previous_text", "true")], "condition_on_previous_text", True),
        ([("stream", "true")], "streams", True),
        ([("stream", "true"), VERBOSE], "streams", False),  # answered whole, as LiteLLM expects
        ([("language", "german")], "language", "de"),
        ([("languages[]", "de")], "language", "de"),
        ([("languages[]", "de,en")], "candidate_languages", ("de", "en")),
        ([("languages[]", "de,en")], "multilingual", True),
        ([("languages[]", "de")], "multilingual", False),
        ([("multilingual", "true")], "multilingual", True),
        ([("include[]", "logprobs")], "token_logprobs", True),
        ([("prompt", "one")], "prompt_tokens", tuple(TOKENIZER.encode(" one"))),
        ([("keywords[]", "Ada"), ("hotwords", " Bob, ,Eve")], "keywords", ("Ada", "Bob", "Eve")),
        ([("keywords[]", "Ada")], "prompt_tokens", ()),
        ([VERBOSE, ("timestamp_granularities[]", "word")], "word_timestamps", True),
        ([("response_format", "srt")], "word_timestamps", True),
        ([("response_format", "srt"), ("subtitles", "raw")], "word_timestamps", False),
        ([VERBOSE, ("diarize", "true")], "word_timestamps", True),
        ([("stream", "true")], "text_only", True),
        ([("stream", "true"), ("stream_include_segments", "true")], "text_only", False),
    ],
)
def test_a_field_reaches_the_decoder(pairs: list[tuple[str, str]], name: str, value: Any) -> None:
    assert getattr(asked(*pairs).options, name) == value


@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ([("response_format", "diarized_json")], SpeakerCount(1, None)),
        ([VERBOSE], None),
        ([VERBOSE, ("num_speakers", "3")], SpeakerCount(3, 3)),
        ([VERBOSE, ("min_speakers", "2")], SpeakerCount(2, None)),
        ([VERBOSE, ("max_speakers", "4")], SpeakerCount(1, 4)),
        ([VERBOSE, NAMES[0], VOICES[0]], SpeakerCount(1, None)),
        ([NAMES[0], VOICES[0]], None),
        ([("response_format", "diarized_json"), SPLIT], None),
    ],
)
def test_voices_are_told_apart_where_the_answer_shows_them(
    pairs: list[tuple[str, str]], count: SpeakerCount | None
) -> None:
    assert asked(*pairs).count == count


def test_each_of_two_channels_is_a_speaker_by_letter_or_by_name() -> None:
    assert asked(SPLIT).speakers == ("A", "B")
    assert asked(SPLIT, *NAMES).speakers == ("Ann", "Bob")
    assert asked(SPLIT, ("track", "1,2")).track_choice.numbers == (1, 2)
    with pytest.raises(InvalidValue, match="'track' takes one number"):
        asked(("track", "1,2"))


@pytest.mark.parametrize(
    ("pairs", "shown"),
    [
        ([], (False, True, False)),
        ([("include[]", "logprobs")], (True, True, False)),
        ([VERBOSE, ("timestamp_granularities[]", "word")], (False, False, True)),
        ([VERBOSE, ("timestamp_granularities[]", "word,segment")], (False, True, True)),
    ],
)
def test_an_answer_shows_what_is_asked(pairs: list[tuple[str, str]], shown: tuple[bool, bool, bool]) -> None:
    options = asked(*pairs).render_options
    assert (options.with_logprobs, options.with_segments, options.with_words) == shown


def test_the_layout_of_subtitles_is_the_clients() -> None:
    widths = {"max_line_width": 20, "max_line_count": 2, "max_words_per_line": 3}
    fields = [(name, str(value)) for name, value in widths.items()] + [("highlight_words", "true")]
    layout = asked(("response_format", "srt"), *fields).render_options.layout
    assert {name: getattr(layout, name) for name in widths} == widths
    assert (layout.raw, layout.highlight_words) == (False, True)


def test_a_translation_is_into_english_only() -> None:
    options = parse_translation_request([("to_language", "English"), ("hotwords", "Ada,Bob")], MODELS).options
    assert (options.task, options.keywords) == ("translate", ("Ada", "Bob"))
    with pytest.raises(InvalidValue) as caught:
        parse_translation_request([("to_language", "de")], MODELS)
    assert caught.value.param == "to_language"


def test_unknown_fields_are_ignored_where_the_settings_say_so() -> None:
    lenient = Models([served(embedded(unknown_fields="ignore"))])
    request = asked(("beam_size", "5"), ("x[y]", "1"), ("seed", "2"), models=lenient)
    assert (request.ignored_fields, request.options.seed) == (("beam_size", "x[y]"), 2)
