"""The command `asr-server`: `serve` and `transcribe`. The options are the fields of `config.Settings`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asr_server import __version__
from asr_server.config import EMBEDDED_MODEL, Settings, environment_name, flag_name
from asr_server.telemetry import configure_logging

if TYPE_CHECKING:
    from asr_server.formats import ResponseFormat

NEXT_STEP = (
    "serving the embedded model whisper-digits, which hears English digits only; "
    "the next step is --model openai/whisper-large-v3-turbo"
)
FORMATS = ("text", "json", "verbose_json", "srt", "vtt")
NOT_FOR_FILES = {"host", "port", "api_key", "root_path", "cors_origins", "ssl_certfile", "ssl_keyfile"}


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


def _settings_options(leave_out: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for setting in reversed(fields(Settings)):
            if setting.name not in leave_out:
                command = _option(setting)(command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """A speech-to-text server that speaks OpenAI's audio API."""


@main.command()
@click.argument("model_name", metavar="[MODEL]", required=False)
@_settings_options()
def serve(model_name: str | None, **options: Any) -> None:
    """Serves MODEL: a Whisper checkpoint's directory or Hugging Face hub name (the same as --model)."""
    settings = _settings(model_name, options)
    configure_logging(settings.log_level)
    if settings.model == str(EMBEDDED_MODEL):
        click.echo(NEXT_STEP, err=True)
    from asr_server.api.server import run

    run(settings)


@main.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--format", "response_format", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--language", help="ISO code or name of the language spoken  [default: detected]")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="writes NAME.txt, .json, .srt or .vtt there  [default: standard output]",
)
@_settings_options(leave_out=frozenset(NOT_FOR_FILES))
def transcribe(
    files: tuple[Path, ...],
    response_format: ResponseFormat,
    language: str | None,
    output_dir: Path | None,
    **options: Any,
) -> None:
    """Transcribes FILES without a server."""
    settings = _settings(None, options)
    configure_logging("error" if settings.log_level == "info" else settings.log_level)
    from asr_server.offline import transcribe_files

    if not transcribe_files(settings, files, response_format, language, output_dir):
        sys.exit(1)


def _settings(model_name: str | None, options: dict[str, Any]) -> Settings:
    if model_name:
        options["model"] = model_name
    return Settings(**options)
