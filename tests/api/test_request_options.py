"""What the fields of a request mean: the options of its decoding, and of the form of its answer."""

from __future__ import annotations

from typing import Any

import pytest

from asr_server import metrics
from asr_server.api.models import ModelRegistry
from asr_server.api.request import (
    TranscriptionRequest,
    parse_fields,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.schemas import TranscriptionFields, TranslationFields
from asr_server.errors import InvalidValue, ModelNotFound
from asr_server.speakers.clustering import SpeakerCount
from tests.api.running_app import served
from tests.embedded import embedded

MODELS = ModelRegistry([served(embedded())])
TOKENIZER = MODELS.default.transcriber.tokenizer
VERBOSE = ("response_format", "verbose_json")
VOICE = [("known_speaker_names[]", "Ann"), ("known_speaker_references[]", "data:,")]


def asked(*pairs: tuple[str, str], models: ModelRegistry = MODELS) -> TranscriptionRequest:
    return parse_transcription_request([*pairs], models)


def translated(*pairs: tuple[str, str]) -> TranscriptionRequest:
    return parse_translation_request([*pairs], MODELS)


# -- Decoding --


def test_a_request_without_fields_detects_the_language_and_reads_the_text_alone() -> None:
    request = asked()
    options = request.options
    assert request.model is MODELS.default
    assert (request.count, request.speakers, request.ignored_fields) == (None, (), ())
    assert (options.task, options.language, options.candidate_languages) == ("transcribe", None, ())
    assert (options.prompt_tokens, options.keywords, options.early_results) == ((), (), True)
    assert options.temperatures == MODELS.default.settings.temperatures == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert (options.max_new_tokens, options.top_k, options.seed) == (None, 0, 0)
    for flag in ("streams", "segment_times", "word_timestamps", "multilingual", "token_logprobs"):
        assert getattr(options, flag) is False, flag


@pytest.mark.parametrize(
    ("pairs", "name", "value"),
    [
        ([("temperature", "0.4")], "temperatures", (0.4,)),
        ([("top_k", "-1")], "top_k", 0),
        ([("top_k", "7")], "top_k", 7),
        ([("max_completion_tokens", "12")], "max_new_tokens", 12),
        ([("seed", "5")], "seed", 5),
        ([("top_p", "0.5")], "top_p", 0.5),
        ([("min_p", "0.5")], "min_p", 0.5),
        ([("repetition_penalty", "1.5")], "repetition_penalty", 1.5),
        ([("frequency_penalty", "0.5")], "frequency_penalty", 0.5),
        ([("presence_penalty", "0.5")], "presence_penalty", 0.5),
        ([("condition_on_previous_text", "true")], "condition_on_previous_text", True),
        ([("stream", "true")], "streams", True),
        ([("stream", "true"), VERBOSE], "streams", False),
        ([("language", "german")], "language", "de"),
        ([("languages[]", "de")], "language", "de"),
        ([("languages[]", "de"), ("languages[]", "en")], "candidate_languages", ("de", "en")),
        ([("languages[]", "de"), ("languages[]", "en")], "multilingual", True),
        ([("languages[]", "de")], "multilingual", False),
        ([("multilingual", "true")], "multilingual", True),
        ([("include[]", "logprobs")], "token_logprobs", True),
        ([("prompt", "one")], "prompt_tokens", tuple(TOKENIZER.encode(" one"))),
        ([("keywords[]", "Ada"), ("hotwords", " Bob, ,Eve")], "keywords", ("Ada", "Bob", "Eve")),
        ([VERBOSE], "segment_times", True),
        ([VERBOSE], "word_timestamps", False),
        ([("response_format", "text")], "segment_times", False),
        ([("channels", "split")], "segment_times", True),
        ([("stream", "true"), ("stream_include_segments", "true")], "segment_times", True),
        ([VERBOSE, ("timestamp_granularities[]", "word")], "word_timestamps", True),
        ([("response_format", "srt")], "word_timestamps", True),
        ([("response_format", "srt"), ("subtitles", "raw")], "word_timestamps", False),
        ([("response_format", "diarized_json")], "word_timestamps", True),
        ([VERBOSE, ("diarize", "true")], "word_timestamps", True),
    ],
)
def test_a_field_reaches_the_decoder(pairs: list[tuple[str, str]], name: str, value: Any) -> None:
    assert getattr(asked(*pairs).options, name) == value


@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ([("response_format", "diarized_json")], SpeakerCount(1, None)),
        ([VERBOSE, ("diarize", "true")], SpeakerCount(1, None)),
        ([VERBOSE], None),
        ([VERBOSE, ("num_speakers", "3")], SpeakerCount(3, 3)),
        ([VERBOSE, ("min_speakers", "2")], SpeakerCount(2, None)),
        ([VERBOSE, ("max_speakers", "4")], SpeakerCount(1, 4)),
        ([VERBOSE, ("min_speakers", "2"), ("max_speakers", "2")], SpeakerCount(2, 2)),
        (
            [VERBOSE, ("known_speaker_names[]", "Ann"), ("known_speaker_references[]", "d")],
            SpeakerCount(1, None),
        ),
        ([("known_speaker_names[]", "Ann"), ("known_speaker_references[]", "d")], None),
        ([("response_format", "diarized_json"), ("channels", "split")], None),
    ],
)
def test_voices_are_told_apart_where_the_answer_shows_them(
    pairs: list[tuple[str, str]], count: SpeakerCount | None
) -> None:
    assert asked(*pairs).count == count


def test_each_of_two_channels_is_a_speaker_by_letter_or_by_name() -> None:
    split = ("channels", "split")
    assert asked(split).speakers == ("A", "B")
    names = [("known_speaker_names[]", "Ann"), ("known_speaker_names[]", "Bob")]
    assert asked(split, *names).speakers == ("Ann", "Bob")
    assert asked(split, ("track", "1,2")).track_choice.numbers == (1, 2)
    assert asked(("track", "2")).track_choice.numbers == (2,)
    with pytest.raises(InvalidValue, match="'track' takes one number"):
        asked(("track", "1,2"))


@pytest.mark.parametrize(
    ("pairs", "shown"),
    [
        ([], (False, True, False)),
        ([("include[]", "logprobs")], (True, True, False)),
        ([VERBOSE, ("timestamp_granularities[]", "word")], (False, False, True)),
        ([VERBOSE, ("timestamp_granularities[]", "segment")], (False, True, False)),
        ([VERBOSE, ("timestamp_granularities[]", "word,segment")], (False, True, True)),
    ],
)
def test_an_answer_shows_what_was_asked_for(
    pairs: list[tuple[str, str]], shown: tuple[bool, bool, bool]
) -> None:
    options = asked(*pairs).render_options
    assert (options.with_logprobs, options.with_segments, options.with_words) == shown


def test_the_layout_of_subtitles_is_the_clients() -> None:
    widths = {"max_line_width": 20, "max_line_count": 2, "max_words_per_line": 3}
    fields = [(name, str(value)) for name, value in widths.items()] + [("highlight_words", "true")]
    layout = asked(("response_format", "srt"), *fields).render_options.layout
    assert {name: getattr(layout, name) for name in widths} == widths
    assert (layout.raw, layout.highlight_words) == (False, True)
    for request in (asked, translated):
        assert request(("response_format", "vtt"), ("subtitles", "raw")).render_options.layout.raw
        assert not request(("response_format", "vtt")).render_options.layout.raw


# -- Translations --


def test_a_translation_is_decoded_as_one_into_english_only() -> None:
    request = translated(("language", "de"), ("hotwords", "Ada,Bob"), ("to_language", "English"))
    options = request.options
    assert (options.task, options.language, options.keywords) == ("translate", "de", ("Ada", "Bob"))
    assert (request.count, options.word_timestamps) == (None, False)
    assert translated(("response_format", "srt")).options.word_timestamps
    with pytest.raises(InvalidValue) as caught:
        translated(("to_language", "de"))
    assert caught.value.param == "to_language"


def test_a_model_of_one_language_cannot_translate() -> None:
    english = served(embedded())
    english.transcriber.can_translate = False
    with pytest.raises(InvalidValue, match="cannot translate") as caught:
        parse_translation_request([], ModelRegistry([english]))
    assert caught.value.param == "model"


# -- Names, limits and combinations --


def test_unknown_fields_are_ignored_where_the_settings_say_so() -> None:
    lenient = ModelRegistry([served(embedded(unknown_fields="ignore"))])
    request = asked(("beam_size", "5"), ("x[y]", "1"), ("seed", "2"), models=lenient)
    assert (request.ignored_fields, request.options.seed) == (("beam_size", "x[y]"), 2)
    with pytest.raises(InvalidValue, match="Unknown field 'beam_size'"):
        asked(("beam_size", "5"))


def test_what_was_asked_for_is_noted_before_the_model_is_looked_for() -> None:
    stats = metrics.begin_request_stats(lambda: "/")
    asked(("model", "whisper-1"), ("stream", "true"))
    assert stats.asked_for == {"model": "whisper-1", "format": "json", "stream": True}
    assert stats.model == MODELS.default.name
    stats = metrics.begin_request_stats(lambda: "/")
    with pytest.raises(ModelNotFound):
        asked(("model", "x" * 100))
    assert (stats.asked_for["model"], stats.model) == ("x" * 80, "")


@pytest.mark.parametrize(
    ("pairs", "is_taken"),
    [
        ([("languages[]", "en," * 1023 + "en")], True),
        ([("languages[]", "en," * 1024 + "en")], False),
        ([("languages[]", "en," * 1022 + "en"), ("languages[]", "en")], True),
        ([("languages[]", "en," * 1023 + "en"), ("languages[]", "en")], False),
        ([("keywords[]", "a,b")] * 1024, True),
        ([("keywords[]", "a,b")] * 1025, False),
    ],
)
def test_an_array_has_at_most_1024_entries(pairs: list[tuple[str, str]], is_taken: bool) -> None:
    name = pairs[0][0]
    if is_taken:
        fields = parse_fields(pairs, TranscriptionFields)
        assert len(getattr(fields, name.removesuffix("[]"))) == 1024
    else:
        assert refusal(*pairs) == (name, f"'{name}' has more than 1,024 entries.")


def refusal(*pairs: tuple[str, str], translates: bool = False) -> tuple[str | None, str]:
    with pytest.raises(InvalidValue) as caught:
        parse_fields(pairs, TranslationFields if translates else TranscriptionFields)
    return caught.value.param, caught.value.message


NAMES = [("known_speaker_names[]", "Ann"), ("known_speaker_names[]", "Bob")]
REFERENCES = [("known_speaker_references[]", "data:,")] * 2
SPLIT = ("channels", "split")


@pytest.mark.parametrize(
    ("pairs", "param", "words"),
    [
        ([SPLIT, NAMES[0]], "known_speaker_names[]", "two different names"),
        ([SPLIT, NAMES[0], NAMES[0]], "known_speaker_names[]", "two different names"),
        ([SPLIT, *NAMES, ("known_speaker_names[]", "Eve")], "known_speaker_names[]", "two different names"),
        ([SPLIT, *NAMES, *REFERENCES], "known_speaker_references[]", "not with channels=split"),
        ([SPLIT, VERBOSE, ("diarize", "true")], "diarize", "not with channels=split"),
        ([SPLIT, VERBOSE, ("max_speakers", "2")], "max_speakers", "not with channels=split"),
        ([VERBOSE, *NAMES, REFERENCES[0]], "known_speaker_names[]", "as many 'known_speaker_references[]'"),
        ([VERBOSE, NAMES[0], *REFERENCES], "known_speaker_references[]", "as many"),
        ([VERBOSE, NAMES[0], NAMES[0], *REFERENCES], "known_speaker_names[]", "different names"),
        ([VERBOSE, ("num_speakers", "2"), ("min_speakers", "1")], "num_speakers", "cannot be combined"),
        ([VERBOSE, ("num_speakers", "2"), ("max_speakers", "3")], "num_speakers", "cannot be combined"),
        ([VERBOSE, ("min_speakers", "3"), ("max_speakers", "2")], "min_speakers", "more than max_speakers"),
        ([("diarize", "true")], "diarize", "a response_format that shows speakers"),
        ([SPLIT, ("include[]", "logprobs")], "include[]", "channels=split"),
        ([("stream_include_segments", "true")], "stream_include_segments", "requires stream=true"),
        (
            [("stream", "true"), ("timestamp_granularities[]", "word")],
            "timestamp_granularities[]",
            "requires response_format=verbose_json",
        ),
        ([("chunking_strategy[threshold]", "0.5")], "chunking_strategy", "Field required"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(
    pairs: list[tuple[str, str]], param: str, words: str
) -> None:
    told = refusal(*pairs)
    assert told[0] == param
    assert words in told[1]


@pytest.mark.parametrize(
    "pairs",
    [
        [SPLIT, *NAMES],
        [VERBOSE, *NAMES, *REFERENCES],
        [VERBOSE, ("num_speakers", "2")],
        [VERBOSE, ("min_speakers", "2"), ("max_speakers", "2")],
        [VERBOSE, ("min_speakers", "32")],
        [VERBOSE, ("max_speakers", "1")],
        [("diarize", "true"), ("stream", "true"), ("stream_include_segments", "true")],
        [("stream", "true"), ("stream_include_segments", "true"), ("timestamp_granularities[]", "word")],
        [("stream", "true"), ("stream_continuous_usage_stats", "true")],
        [("response_format", "vtt"), ("max_line_width", "20"), ("max_line_count", "2")],
        [("language", "auto"), ("multilingual", "true")],
    ],
)
def test_fields_that_go_together_are_taken(pairs: list[tuple[str, str]]) -> None:
    parse_fields(pairs, TranscriptionFields)


def test_the_names_of_a_translations_speakers_are_those_of_its_channels() -> None:
    parse_fields([SPLIT, *NAMES], TranslationFields)
    param, words = refusal(*NAMES, translates=True)
    assert param == "known_speaker_names[]"
    assert "channels=split" in words


def test_a_name_without_brackets_is_taken_for_several() -> None:
    fields = parse_fields([SPLIT, ("known_speaker_names", "Ann,Bob")], TranscriptionFields)
    assert fields.known_speaker_names == ["Ann", "Bob"]
    voices = parse_fields(
        [VERBOSE, ("known_speaker_names", "Ann"), ("known_speaker_references", "data:audio/wav;base64,AA")],
        TranscriptionFields,
    )
    assert voices.known_speaker_references == ["data:audio/wav;base64,AA"]


def test_an_object_is_either_whole_or_in_fields() -> None:
    whole = ("chunking_strategy", '{"type": "auto"}')
    assert refusal(whole, ("chunking_strategy[type]", "auto"))[0] == "chunking_strategy[type]"
    assert refusal(("seed[x]", "1"))[0] == "seed[x]"
    assert refusal(("seed", "1"), ("seed", "1"))[1] == "'seed' was given more than once."


def test_a_refused_value_is_repeated_with_the_reason() -> None:
    param, message = refusal(("temperature", "warm"))
    assert (param, message.startswith("Invalid value for 'temperature': 'warm'. ")) == ("temperature", True)
    assert message.endswith(".")
    assert refusal(("languages[]", '["\\ud800"]'))[1].startswith("'languages[]' has half a surrogate pair")
