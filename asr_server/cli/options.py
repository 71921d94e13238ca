"""Make a command's options from `server.settings`, in sections; check values, read whisper's spellings."""

import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError

from asr_server.annexes.model_sources.find import checkpoint_on_disk, resolve_checkpoint
from asr_server.checkpoint.files import why_not_kept
from asr_server.cli.checks import Check, model_fits, problem
from asr_server.config import EMBEDDED_MODEL, flag_name
from asr_server.core import Clip
from asr_server.errors import CheckpointError
from asr_server.levels import Interval, joined
from asr_server.server.settings import FIELDS, ServerSettings, environment_names, extra
from asr_server.telemetry import configure_logging, printable

logger = logging.getLogger(__name__)


class SettingsError(Exception):
    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def checked_settings(
    values: Mapping[str, Any],
    checks: tuple[Check, ...] = (),
    before_fetch: Callable[[ServerSettings], None] | None = None,
) -> ServerSettings:
    """Return the settings, with the model as a directory. Raises SettingsError with all that is wrong.

    A model is fetched last, after `before_fetch`. If the default cannot be had, the embedded model replaces
    it, and `why_embedded` says why.
    """
    settings, problems = _validated(values)
    problems += [line for check in checks for line in check(settings)]
    if before_fetch and not problems:
        before_fetch(settings)
    try:
        directory = checkpoint_on_disk(settings.model)
        if directory is None and not problems:
            _warn_of_lost_model()
            directory = resolve_checkpoint(settings.model)
        if directory and not problems:
            problems += model_fits(settings, directory)
    except CheckpointError as error:
        if "model" not in values and not problems:
            settings = replace(settings, model=str(EMBEDDED_MODEL), why_embedded=str(error))
            return replace(settings, served_model_name=settings.model_names[0])
        problems.append(problem("model", settings.model, str(error)))
    if problems:
        raise SettingsError(problems)
    return replace(settings, model=str(directory), served_model_name=settings.model_names[0])


def _warn_of_lost_model() -> None:
    """Print it where the log's level would hide it."""
    if reason := why_not_kept():
        if logger.isEnabledFor(logging.WARNING):
            logger.warning("%s", reason)
        else:
            click.echo(f"Warning: {printable(reason)}", err=True)


def _validated(values: Mapping[str, Any]) -> tuple[ServerSettings, list[str]]:
    try:
        return ServerSettings(**values), []
    except ValidationError as error:
        wrong = {str(details["loc"][0]): details for details in error.errors(include_url=False)}
    problems = [
        problem(name, details["input"], _reason(name, details["msg"])) for name, details in wrong.items()
    ]
    right = {name: value for name, value in values.items() if name not in wrong}
    if "port" in wrong:
        right["port"] = 0  # any free one: whoever uses the default is no concern of who asked for another
    return ServerSettings(**right), problems


def _reason(setting: str, message: str) -> str:
    if allowed := extra(setting)["allowed"]:
        return f"must be {allowed}"
    return message.replace("Input should be", "must be").replace("String should", "must")


def _takes_empty_text(setting: str) -> bool:
    values: dict[str, Any] = {setting: ""}
    try:
        ServerSettings(**values)
    except ValidationError:
        return False
    return True


WRONG_USAGE = 2  # the exit status, as of any command that was called wrongly
# What Kubernetes sets in every pod for services named asr-server, asr-server-wyoming and -metrics.
_PORTS: Final = ("port", "wyoming_port", "metrics_port")
_LINKED_PORT: Final = re.compile(r"(tcp|udp|sctp)://.*")
_SERVICE_LINK: Final = re.compile(
    r"ASR_SERVER_((WYOMING|METRICS)_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)


def language_option() -> Callable[[Any], Any]:
    words = "code or name of the language spoken, or auto  [default: detected]"
    return click.option("-l", "--language", help=words)


def choice_option(flag: str, choices: tuple[str, ...], words: str) -> Callable[[Any], Any]:
    """Return an option; its default is the first choice."""
    return click.option(flag, type=click.Choice(choices), default=choices[0], show_default=True, help=words)


def settings_options(names: Collection[str] = FIELDS) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for setting in reversed(FIELDS):
            if setting in names:
                command = _option(setting)(command)
        return command

    return decorate


def settings_from(
    options: dict[str, Any], checks: tuple[Check, ...], model_name: str | None = None
) -> ServerSettings:
    """Return a command's settings. Prints wrong ones and ends the command."""
    given = dict(options)
    if model_name:
        given["model"] = model_name
    elif click.get_current_context().get_parameter_source("model") is ParameterSource.DEFAULT:
        del given["model"]  # only a model that nobody asked for may be replaced
    try:
        return checked_settings(given, checks, configure_log)
    except SettingsError as error:
        exit_with(error.problems)


def is_flag_given(setting: str) -> bool:
    return click.get_current_context().get_parameter_source(setting) is ParameterSource.COMMANDLINE


def log_errors_alone(options: dict[str, Any]) -> None:
    """Unless asked for: a server's log is of no use beside a result."""
    if click.get_current_context().get_parameter_source("log_level") is ParameterSource.DEFAULT:
        options["log_level"] = "error"


def exit_with(problems: list[str]) -> NoReturn:
    for line in problems:
        print_error(line)
    raise click.exceptions.Exit(WRONG_USAGE) from None


def print_error(error: object) -> None:
    click.echo(f"Error: {printable(str(error))}", err=True)


def configure_log(settings: ServerSettings) -> None:
    configure_logging(settings.log_level, settings.log_format)
    for line in unknown_variables(os.environ):
        logger.warning("%s", line)


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each variable that looks like a setting's but is none."""
    known = [name for setting in FIELDS for name in environment_names(setting)]
    for name in sorted(environment):
        if name.startswith("ASR_SERVER_") and name not in known and not _SERVICE_LINK.fullmatch(name):
            nearest = difflib.get_close_matches(name, known, n=1)
            yield f"{name} is ignored: no setting has this name" + (
                f"; did you mean {nearest[0]}?" if nearest else ""
            )


def _option(setting: str) -> Callable[[Any], Any]:
    field, flag = FIELDS[setting], flag_name(setting)
    kind: Any = field.annotation
    is_switch, is_choice = kind is bool, get_origin(kind) is Literal
    value = (
        f"[{'|'.join(get_args(kind))}]" if is_choice else {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")
    )
    return click.option(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
        cls=_SettingOption,
        type=_Switch() if is_switch else str,
        default=field.default,
        metavar=None if is_switch else value,
        envvar=environment_names(setting),
        show_envvar=True,
        show_default=True,
        help=field.description,
    )


class _SettingOption(click.Option):
    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        given = [os.environ.get(name) for name in environment_names(self.name or "")]
        value = next(filter(None, given), given[0])
        is_linked_port = self.name in _PORTS and value is not None and _LINKED_PORT.fullmatch(value)
        return None if is_linked_port else value

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if value == "" and not _takes_empty_text(self.name or ""):
            return self.get_default(ctx), ParameterSource.DEFAULT
        return value, source


class _Switch(click.types.BoolParamType):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            return value


class SectionedCommand(click.Command):
    """A command with its options under headings; those of no section come first."""

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        records = {each.name: record for each in options if (record := each.get_help_record(ctx))}
        listed = {
            heading: [records.pop(name) for name in names if name in records]
            for heading, names in self._sections.items()
        }
        for heading, own in {"Options": [*records.values()], **listed}.items():
            if own:
                with formatter.section(heading):
                    formatter.write_dl(own)


# -- What `transcribe` is given: whisper's spellings of options, and parts of a recording --------------------

END_OF_OPTIONS: Final = "--"
OTHER_NAMES: Final = {
    "--output-format": "--format",
    "--initial-prompt": "--prompt",
    "--threads": "--cpu-threads",
    "--compute-type": "--dtype",
}
# Options that take True or False there; the flag that each value means here, empty for none.
SAME_FLAGS: Final = (
    "--word-timestamps",
    "--highlight-words",
    "--condition-on-previous-text",
    "--multilingual",
)
SWITCHES: Final = {flag: {"True": flag, "False": ""} for flag in SAME_FLAGS} | {
    "--verbose": {"True": "", "False": "--quiet"},
    "--fp16": {"True": "", "False": ""},  # `--dtype` chooses what the processor has
    "--vad-filter": {"True": "", "False": ""},  # long silences are left out anyway
}
# Switches of other commands that go without a value: the arguments that they mean here.
OTHER_SWITCHES: Final = {"--diarize": ("--speakers", "auto"), "--vad-filter": ()}


class WhisperSpelledCommand(SectionedCommand):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_our_spelling(args))


def in_our_spelling(args: Sequence[str]) -> list[str]:
    end = args.index(END_OF_OPTIONS) if END_OF_OPTIONS in args else len(args)
    return [*_respelled(list(args[:end])), *args[end:]]


def _respelled(args: list[str]) -> Iterator[str]:
    while args:
        name, equals, value = args.pop(0).partition("=")
        if not name.startswith("--"):
            yield name + equals + value
            continue
        name = name.replace("_", "-")
        name = OTHER_NAMES.get(name, name)
        choices = SWITCHES.get(name, {})
        given = value if equals else args[0] if args else ""
        if given in choices:
            del args[: not equals]
            if choices[given]:
                yield choices[given]
        elif not equals and name in OTHER_SWITCHES:
            yield from OTHER_SWITCHES[name]
        else:
            yield name + equals + value


_TIME: Final = r"(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d+)?)"
_CLIP: Final = re.compile(rf"{_TIME}-(?:{_TIME})?")


def parse_clips(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Clip, ...]:
    try:
        clips = [_clip(text.strip()) for value in values for text in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return tuple(Clip(*interval) for interval in joined(clips))


def _clip(text: str) -> Interval:
    match = _CLIP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no START-END, such as 90-120, 1:30-2:00 or 1:02:30- for the rest.")
    start, end = match.groups()[:3], match.groups()[3:]
    start_s, end_s = _seconds(*start), math.inf if end[2] is None else _seconds(*end)
    if end_s <= start_s:
        raise ValueError(f"{text!r} ends before it begins.")
    return start_s, end_s


def _seconds(hours: str | None, minutes: str | None, seconds: str) -> float:
    return 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds)
