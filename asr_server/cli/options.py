"""The fields of `config.Settings` as options of a command, and back, listed in sections for `--help`.

What a person needs comes before what only tuning needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from asr_server.cli.preflight import Check, SettingsError, checked_settings
from asr_server.config import FIELDS, Settings, environment_name, flag_name

WRONG_USAGE = 2  # the exit status, as of any command that was called wrongly
_SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://.*")


def settings_options(leave_out: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    """Adds an option for every setting, but for those left out, to a click command."""

    def decorate(command: Any) -> Any:
        for setting in reversed(FIELDS):
            if setting not in leave_out:
                command = _option(setting)(command)
        return command

    return decorate


def settings_from(
    options: dict[str, Any],
    checks: tuple[Check, ...],
    model_name: str | None = None,
    before_fetch: Callable[[Settings], None] = lambda _: None,
) -> Settings:
    """The settings that a command was given; `model_name` is its argument, which wins over `--model`.

    Where some are wrong, it prints a line for each and ends the command.

    Args:
        before_fetch: called with the settings, once they are known to be right and before a model is fetched.
    """
    given = dict(options)
    if model_name:
        given["model"] = model_name
    elif click.get_current_context().get_parameter_source("model") is ParameterSource.DEFAULT:
        del given["model"]  # only a model that nobody asked for may be replaced
    try:
        return checked_settings(given, checks, before_fetch)
    except SettingsError as error:
        for problem in error.problems:
            click.echo(f"Error: {problem}", err=True)
        raise click.exceptions.Exit(WRONG_USAGE) from None


def _option(setting: str) -> Callable[[Any], Any]:
    """The option of one setting. It takes any text: what is wrong with it, `checked_settings` says."""
    field, flag = FIELDS[setting], flag_name(setting)
    is_switch = field.annotation is bool
    return click.option(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
        cls=_SettingOption,
        type=_Switch() if is_switch else str,
        default=field.default,
        metavar=None if is_switch else _metavar(field.annotation),
        envvar=environment_name(setting),
        show_envvar=True,
        show_default=True,
        help=field.description,
    )


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"[{'|'.join(get_args(kind))}]"
    return {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")


class _SettingOption(click.Option):
    """Does not take for a setting what Kubernetes says of a service named asr-server: ASR_SERVER_PORT=tcp://..."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value and _SERVICE_LINK.fullmatch(value) else value


class _Switch(click.types.BoolParamType):
    """Leaves what is neither true nor false, in an environment variable, to be refused with all the rest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            return value


class SectionedCommand(click.Command):
    """A command whose options are listed under headings; those of no section come first."""

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **attributes: Any) -> None:
        """`sections`: heading to the names of its parameters."""
        super().__init__(*args, **attributes)
        self._headings = ("Options", *sections)
        self._heading_of = {name: heading for heading, names in sections.items() for name in names}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self._headings}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                listed[self._heading_of.get(parameter.name or "", "Options")].append(record)
        for heading, records in listed.items():
            with formatter.section(heading):
                formatter.write_dl(records)
