"""Makes the options of a command from the fields of `config.Settings`, in sections, and checks their values.

All that is wrong with the settings (files, a GPU, the model, packages that are missing) is reported together,
before anything heavy starts. Used by the commands `serve` and `transcribe`, in the process that the user
starts. Imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import re
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError

from asr_server.api.auth import read_keys
from asr_server.checkpoint.find import checkpoint_on_disk, resolve_checkpoint
from asr_server.config import (
    EMBEDDED_MODEL,
    FIELDS,
    NO_PORT,
    Settings,
    allowed_values,
    environment_name,
    flag_name,
    naming,
)
from asr_server.errors import CheckpointError
from asr_server.machine import num_gpus
from asr_server.telemetry import configure_logging

Check = Callable[[Settings], Iterator[str]]


class SettingsError(Exception):
    """Something is wrong with the settings: `problems` has a line for each wrong one."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def checked_settings(
    values: Mapping[str, Any],
    checks: tuple[Check, ...] = (),
    before_fetch: Callable[[Settings], None] = lambda _: None,
) -> Settings:
    """Returns the settings with these values, the defaults for the others, and the model as a directory.

    A model is fetched, but not before all else is known to be right. Where `values` have no model, and the
    default cannot be had, the embedded one takes its place, and `why_embedded` says why.

    Args:
        before_fetch: called with the settings, once all else is known to be right.
    Raises:
        SettingsError: something is wrong.
    """
    settings, problems = _validated(values)
    problems += [problem for check in checks for problem in check(settings)]
    if not problems:
        before_fetch(settings)
    try:
        find = checkpoint_on_disk if problems else resolve_checkpoint
        directory = find(settings.model)
    except CheckpointError as error:
        if "model" not in values and not problems:
            return _with_embedded_model(settings, str(error))
        problems.append(_problem("model", settings.model, str(error)))
    if problems:
        raise SettingsError(problems)
    return replace(settings, model=str(directory), served_model_name=settings.model_names[0])


def _with_embedded_model(settings: Settings, reason: str) -> Settings:
    settings = replace(settings, model=str(EMBEDDED_MODEL), why_embedded=reason)
    return replace(settings, served_model_name=settings.model_names[0])


def _validated(values: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Returns the settings, with others in place of wrong values, and a line for each wrong value."""
    try:
        return Settings(**values), []
    except ValidationError as error:
        wrong = {str(details["loc"][0]): details["input"] for details in error.errors(include_url=False)}
    problems = [_problem(name, value, f"must be {allowed_values(name)}") for name, value in wrong.items()]
    right = {name: value for name, value in values.items() if name not in wrong}
    if "port" in wrong:
        right["port"] = 0  # any free one: whoever uses the default is no concern of who asked for another
    return Settings(**right), problems


def _problem(setting: str, value: object, reason: str) -> str:
    return f"{naming(setting)} is {value!r}: {' '.join(reason.split())}"


# -- What a model needs --------------------------------------------------------------------------------------


def gpu(settings: Settings) -> Iterator[str]:
    if settings.device == "cuda" and settings.executor != "ray" and (reason := _why_no_cuda()):
        yield _problem("device", settings.device, f"{reason}; allowed here: auto or cpu")


def ray_package(settings: Settings) -> Iterator[str]:
    if settings.executor == "ray" and find_spec("ray") is None:
        yield _problem("executor", "ray", "needs Ray, an extra: pip install '.[ray]' in the checkout")


def tensor_parallel(settings: Settings) -> Iterator[str]:
    size = settings.tensor_parallel_size
    if size == 1:
        return
    if settings.executor == "inline":
        yield _problem("tensor_parallel_size", size, "needs --executor multiprocess or ray")
    if settings.executor == "ray" and settings.replicas_per_device > 1:
        yield _problem("tensor_parallel_size", size, "with --executor ray needs --replicas-per-device 1")
    if settings.compute_workers > 1:
        yield _problem("tensor_parallel_size", size, "needs --compute-workers 0 or 1")
    if settings.executor != "ray" and settings.device != "cpu" and 0 < (found := num_gpus()) < size:
        yield _problem("tensor_parallel_size", size, f"needs as many GPUs; this process sees {found}")


def _why_no_cuda() -> str:
    """Returns why CUDA cannot work; empty if it may."""
    if Path("/dev/kfd").exists():
        return ""  # an AMD GPU, which torch calls cuda too
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver"
    if not num_gpus():
        return "the NVIDIA driver has no GPU for this process"
    return ""


# -- What a server needs besides -----------------------------------------------------------------------------


def tls_files(settings: Settings) -> Iterator[str]:
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if key and not certificate:
        yield _problem("ssl_keyfile", key, f"needs a certificate too: {naming('ssl_certfile')}")
    unreadable = [
        _problem(setting, path, reason)
        for setting, path in (("ssl_certfile", certificate), ("ssl_keyfile", key))
        if path and (reason := _why_unreadable(path))
    ]
    yield from unreadable
    if certificate and not unreadable:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key or None, password=lambda: b"")
        except (OSError, ValueError) as error:
            reason = (
                "must be a certificate in PEM format, its key in the same file or in that of"
                f" {naming('ssl_keyfile')}, without a password ({error})"
            )
            yield _problem("ssl_certfile", certificate, reason)


def _why_unreadable(path: str) -> str:
    try:
        with open(path, "rb"):
            return ""
    except OSError as error:
        return f"the file cannot be read: {error.strerror}"


def key_file(settings: Settings) -> Iterator[str]:
    path = settings.api_key_file
    if not path:
        return
    try:
        if not read_keys(Path(path)):
            yield _problem("api_key_file", path, "must have at least one key, in a line of its own")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        yield _problem("api_key_file", path, f"the file cannot be read: {reason}")


def address(settings: Settings) -> Iterator[str]:
    """Binds the port and frees it again, so that its errors are reported before the model loads."""
    yield from _why_not_on(settings, "port")


def wyoming(settings: Settings) -> Iterator[str]:
    if settings.wyoming_port == NO_PORT:
        return
    if find_spec("wyoming") is None:
        reason = "needs the package wyoming, an extra: pip install '.[wyoming]' in the checkout"
        yield _problem("wyoming_port", settings.wyoming_port, reason)
    else:
        yield from _why_not_on(settings, "wyoming_port")


def _why_not_on(settings: Settings, port_setting: str) -> Iterator[str]:
    port = getattr(settings, port_setting)
    try:
        addresses = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        yield _problem("host", settings.host, f"no address of this machine ({error})")
        return
    for family, kind, protocol, _, where in addresses:
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
        except OSError as error:
            setting = "host" if error.errno == errno.EADDRNOTAVAIL else port_setting
            reason = f"cannot listen on {where[0]} port {port}: {error.strerror}"
            yield _problem(setting, getattr(settings, setting), reason)


FOR_A_MODEL: Final[tuple[Check, ...]] = (gpu, ray_package, tensor_parallel)
FOR_A_SERVER: Final[tuple[Check, ...]] = (*FOR_A_MODEL, tls_files, key_file, address, wyoming)


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
) -> Settings:
    """Returns a command's settings; `model_name` is its argument, which wins over `--model`.

    Where some are wrong, it prints a line for each and ends the command. The log is set up before a model is
    fetched, because that is logged.
    """
    given = dict(options)
    if model_name:
        given["model"] = model_name
    elif click.get_current_context().get_parameter_source("model") is ParameterSource.DEFAULT:
        del given["model"]  # only a model that nobody asked for may be replaced
    try:
        return checked_settings(given, checks, _configure_logging)
    except SettingsError as error:
        for problem in error.problems:
            click.echo(f"Error: {problem}", err=True)
        raise click.exceptions.Exit(WRONG_USAGE) from None


def _configure_logging(settings: Settings) -> None:
    configure_logging(settings.log_level, settings.log_format)


def _option(setting: str) -> Callable[[Any], Any]:
    """Makes the option of one setting. It takes any text: `checked_settings` reports what is wrong."""
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
    """Ignores what Kubernetes sets for a service named asr-server: ASR_SERVER_PORT=tcp://..."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value and _SERVICE_LINK.fullmatch(value) else value


class _Switch(click.types.BoolParamType):
    """Passes on an environment variable that is neither true nor false: `checked_settings` refuses it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            return value


class SectionedCommand(click.Command):
    """A command whose options are listed under headings; those of no section come under "Options", the first.

    A section that gives its names as a tuple lists them in that order, others in the order of declaration.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **attributes: Any) -> None:
        """`sections`: heading to the names of its parameters."""
        super().__init__(*args, **attributes)
        self._headings = dict.fromkeys(("Options", *sections))
        orders = [names for names in sections.values() if isinstance(names, tuple)]
        self._place_of = {name: place for names in orders for place, name in enumerate(names)}
        self._heading_of = {name: heading for heading, names in sections.items() for name in names}

    def _place(self, parameter: click.Parameter) -> int:
        """Its place in its section; behind all that have one, where the section has no order."""
        return self._place_of.get(parameter.name or "", len(self._place_of))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self._headings}
        for parameter in sorted(self.get_params(ctx), key=self._place):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                listed[self._heading_of.get(parameter.name or "", "Options")].append(record)
        for heading, records in listed.items():
            with formatter.section(heading):
                formatter.write_dl(records)
