import pytest

from asr_server.transcription.language import continuation


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
