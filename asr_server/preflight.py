"""Checks all settings together at the start, before anything that takes time has begun."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from asr_server.config import Settings, allowed_values, naming


class SettingsError(Exception):
    """Something is wrong with the settings: `problems` has a line for each wrong one."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def checked_settings(values: Mapping[str, object]) -> Settings:
    """The settings with these values, and the defaults for the others. Raises SettingsError."""
    try:
        return Settings(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        wrong = {str(details["loc"][0]): details["input"] for details in error.errors(include_url=False)}
    raise SettingsError(
        [_problem(name, value, f"must be {allowed_values(name)}") for name, value in wrong.items()]
    )


def _problem(setting: str, value: object, reason: str) -> str:
    return f"{naming(setting)} is {value!r}: {reason}"
