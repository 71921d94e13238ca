"""The fields of `config.Settings` as options of a command, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import click

from asr_server.config import Settings, environment_name, flag_name


def settings_options(leave_out: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    """Adds an option for every setting, but for those left out, to a click command."""

    def decorate(command: Any) -> Any:
        for setting in reversed(fields(Settings)):
            if setting.name not in leave_out:
                command = _option(setting)(command)
        return command

    return decorate


def settings_from(options: dict[str, Any], model_name: str | None = None) -> Settings:
    """The settings that a command was given; `model_name` is its argument, which wins over `--model`."""
    if model_name:
        options["model"] = model_name
    return Settings(**options)


def _option(setting: Field[Any]) -> Callable[[Any], Any]:
    choices, flag = setting.metadata["choices"], flag_name(setting.name)
    return click.option(
        f"{flag}/--no-{flag.removeprefix('--')}" if isinstance(setting.default, bool) else flag,
        type=click.Choice(choices) if choices else type(setting.default),
        default=setting.default,
        envvar=environment_name(setting.name),
        show_envvar=True,
        show_default=setting.name != "model" or "the embedded whisper-digits",
        help=setting.metadata["help"],
    )
