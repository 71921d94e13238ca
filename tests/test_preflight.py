"""Settings are checked once, together, at the start: each wrong one is a line that says how to mend it."""

from __future__ import annotations

import pytest

from asr_server.config import FIELDS, Settings, allowed_values, environment_name, flag_name
from asr_server.preflight import SettingsError, checked_settings


def problems(**values: object) -> list[str]:
    with pytest.raises(SettingsError) as error:
        checked_settings(values)
    return error.value.problems


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("chunks_ahead", "0", "a whole number of at least 1"),
        ("encode_batch", "-4", "a whole number of at least 0"),
        ("port", "70000", "a whole number from 0 to 65535"),
        ("port", "http", "a whole number from 0 to 65535"),
        ("replicas", "-1", "a whole number of at least 1"),
        ("replicas", "1.5", "a whole number of at least 1"),
        ("compute_workers", "5", "a whole number from 0 to 4"),
        ("preprocess_workers", "0", "a whole number of at least 1"),
        ("max_fallbacks", "6", "a whole number from 0 to 5"),
        ("max_audio_s", "nan", "a number above 0"),
        ("max_audio_s", "inf", "a number above 0"),
        ("drain_s", "-1", "a number of at least 0"),
        ("device", "tpu", "auto, cpu or cuda"),
        ("log_level", "loud", "debug, info, warning or error"),
        ("copy_overlap", "maybe", "true or false"),
        ("root_path", "asr", "empty, or begins with /"),
        ("model", "", "some text"),
    ],
)
def test_a_wrong_value_is_one_line_with_flag_environment_name_value_and_what_is_allowed(
    setting: str, value: str, allowed: str
) -> None:
    named = f"{flag_name(setting)} ({environment_name(setting)})"
    assert problems(**{setting: value}) == [f"{named} is {value!r}: must be {allowed}"]


def test_several_wrong_values_are_a_line_each() -> None:
    lines = problems(port="70000", replicas="-1", host="127.0.0.1", chunks_ahead="0")
    assert [line.split()[0] for line in lines] == ["--replicas", "--chunks-ahead", "--port"]


def test_every_default_is_allowed_and_every_setting_says_what_is() -> None:
    assert checked_settings({name: str(field.default) for name, field in FIELDS.items()}) == Settings()
    assert all(allowed_values(name) for name in FIELDS)
    assert all(field.description for field in FIELDS.values())


def test_the_temperature_ladder_is_capped() -> None:
    assert Settings().temperatures == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert Settings(max_fallbacks=0).temperatures == (0.0,)
    assert Settings(max_fallbacks=2).temperatures == (0.0, 0.2, 0.4)
