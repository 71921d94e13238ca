"""Codes and names of languages as clients write them, and how their texts are joined."""

import pytest

from asr_server.errors import InvalidValue
from asr_server.language_codes import NAMES, Languages, continuation, whisper_code

WHISPER = Languages(NAMES)


@pytest.mark.parametrize(
    ("code", "codes", "names"),
    [
        ("de", ("de", "ger", "deu", " DE-at "), ("German",)),
        ("en", ("en", "EN", "eng"), ("english",)),
        ("es", ("spa",), ("Spanish",)),
        ("he", ("iw",), ()),
        ("ht", (), ("Haitian Creole",)),
        ("jw", ("jv",), ()),
        ("no", ("nb-NO",), ()),
        ("pt", ("pt_BR", "pt-BR", "POR-br"), ()),
        ("yue", ("yue",), ()),
        ("zh", ("zh-CN", "zh_Hans_CN", "zho-Hans-CN", "cmn"), ("mandarin",)),
    ],
)
def test_codes_names_and_regional_forms_are_understood(
    code: str, codes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert {whisper_code(each) for each in codes} <= {code}
    assert {WHISPER.code(each) for each in (*codes, *names)} == {code}
    assert [whisper_code(each) for each in ("tlh", "")] == ["tlh", ""], "unknown ones stay"


@pytest.mark.parametrize("text", ["xx", "klingon", "-", "e", "<|en|>", "en; drop"])
def test_a_model_of_all_languages_knows_no_other(text: str) -> None:
    with pytest.raises(InvalidValue):
        WHISPER.code(text)


@pytest.mark.parametrize("text", ["xx", "klingon", "-", "e", "<|en|>", "en; drop", "french"])
def test_an_unknown_language_is_refused_by_the_field_and_the_languages_of_this_model(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Languages(["en", "de"]).code(text, "languages[]")
    assert caught.value.param == "languages[]"
    assert "de (german), en (english)" in caught.value.message
    assert f"{text}'" in caught.value.message
    assert "(french)" not in caught.value.message


def test_a_model_of_one_language_has_none_to_detect() -> None:
    assert Languages(["en"]).only == "en"
    assert Languages([]).only == "en"
    assert WHISPER.only is None


@pytest.mark.parametrize(
    ("so_far", "text", "language", "added"),
    [
        ("", " one", "en", "one"),
        ("one", " two ", "en", " two"),
        ("one", "two", "en", " two"),
        ("one", "two", None, " two"),
        ("one", "  ", "en", ""),
        ("一", "二", "zh", "二"),
        ("一", " 二", "zh", " 二"),
    ],
)
def test_one_space_between_stretches_where_the_language_has_spaces(
    so_far: str, text: str, language: str | None, added: str
) -> None:
    assert continuation(so_far, text, language) == added
