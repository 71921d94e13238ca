"""What a setting may be, in words."""

from __future__ import annotations

import pytest

from asr_server.cli.setting_values import takes_empty_text
from asr_server.config import environment_name, flag_name
from tests.cli.test_options import problems

ORIGINS = "*, or origins such as https://example.com, separated by commas"


def test_only_some_settings_take_an_empty_text() -> None:
    assert [takes_empty_text(setting) for setting in ("api_key", "root_path", "port", "model")] == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("chunks_ahead", "0", "a whole number of at least 1"),
        ("encode_batch", "-4", "a whole number from 0 to 1e+06"),
        ("port", "70000", "a whole number from 0 to 65535"),
        ("port", "http", "a whole number from 0 to 65535"),
        ("replicas", "-1", "a whole number from 0 to 1024"),
        ("replicas", "1.5", "a whole number from 0 to 1024"),
        ("replicas", "9" * 20, "a whole number from 0 to 1024"),
        ("compute_workers", "5", "a whole number from 0 to 4"),
        ("preprocess_workers", "0", "a whole number from 1 to 1024"),
        ("max_fallbacks", "6", "a whole number from 0 to 5"),
        ("max_audio_s", "nan", "a number above 0"),
        ("max_audio_s", "inf", "a number above 0"),
        ("drain_s", "-1", "a number of at least 0"),
        ("device", "tpu", "auto, cpu or cuda"),
        ("log_level", "loud", "debug, info, warning or error"),
        ("copy_overlap", "maybe", "true or false"),
        ("root_path", "asr", "empty, or begins with /"),
        ("model", "", "some text"),
        (
            "served_model_name",
            " ",
            "empty, or printable ASCII without spaces at its ends",
        ),
        ("max_stall_s", "1e-9", "a number of at least 1"),
        ("max_chunk_s", "1e30", "a number from 0 to 3600"),
        ("cors_origins", "a.example", ORIGINS),
        (
            "cors_origins",
            "https://a.example/",
            ORIGINS,
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_flag_environment_name_value_and_what_is_allowed(
    setting: str, value: str, allowed: str
) -> None:
    named = f"{flag_name(setting)} ({environment_name(setting)})"
    assert problems(**{setting: value}) == [f"{named} is {value!r}: must be {allowed}"]
