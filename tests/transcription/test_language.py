import pytest

from asr_server.errors import InvalidValue
from asr_server.transcription.language import NAMES, Languages, likeliest, name_of

WHISPER = Languages(NAMES)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("en", "en"),
        ("EN", "en"),
        (" de ", "de"),
        ("english", "en"),
        ("German", "de"),
        ("zh-CN", "zh"),
        ("zh_Hans_CN", "zh"),
        ("pt-BR", "pt"),
        ("mandarin", "zh"),
        ("Haitian Creole", "ht"),
        ("yue", "yue"),
        ("jv", "jw"),
        ("nb-NO", "no"),
        ("iw", "he"),
        ("eng", "en"),
        ("deu", "de"),
        ("ger", "de"),
        ("spa", "es"),
        ("POR-br", "pt"),
    ],
)
def test_codes_names_and_regional_forms_are_understood(text: str, code: str) -> None:
    assert WHISPER.code(text) == code


@pytest.mark.parametrize("text", ["xx", "klingon", "-", "e", "<|en|>", "en; drop"])
def test_an_unknown_language_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        WHISPER.code(text)


def test_the_refusal_names_the_field_and_lists_what_this_model_knows() -> None:
    with pytest.raises(InvalidValue) as caught:
        Languages(["en", "de"]).code("french", "languages[]")
    assert caught.value.param == "languages[]"
    assert "de (german), en (english)" in caught.value.message
    assert "french'" in caught.value.message
    assert "(french)" not in caught.value.message


def test_a_model_of_one_language_has_none_to_detect() -> None:
    assert Languages(["en"]).only == "en"
    assert Languages([]).only == "en"
    assert WHISPER.only is None


def test_names_are_lower_case_english() -> None:
    assert name_of("en") == "english"
    assert name_of("zh") == "chinese"
    assert all(name == name.lower() for name in NAMES.values())


def test_without_speech_the_language_is_called_unknown() -> None:
    assert name_of(None) == "unknown"


def test_the_likeliest_is_taken_among_the_candidates_only() -> None:
    probabilities = {"en": 0.7, "de": 0.2, "fr": 0.1}
    assert likeliest(probabilities, ()) == "en"
    assert likeliest(probabilities, ("fr", "de")) == "de"
