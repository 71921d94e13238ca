"""Language codes of other standards, as Whisper's."""

from __future__ import annotations

import pytest

from asr_server.language_codes import whisper_code


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("de", "de"),
        ("ger", "de"),
        ("deu", "de"),
        (" DE-at ", "de"),
        ("pt_BR", "pt"),
        ("zho-Hans-CN", "zh"),
        ("cmn", "zh"),
        ("yue", "yue"),
        ("iw", "he"),
        ("nb-NO", "no"),
        ("jv", "jw"),
        ("tlh", "tlh"),
        ("", ""),
    ],
)
def test_a_code_of_another_standard_is_whispers_and_an_unknown_one_stays(given: str, code: str) -> None:
    assert whisper_code(given) == code
