"""`asr-server transcribe`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asr_server.cli.options import settings_from, settings_options
from asr_server.preflight import FOR_A_MODEL
from asr_server.telemetry import configure_logging

if TYPE_CHECKING:
    from asr_server.formats import ResponseFormat

FORMATS = ("text", "json", "verbose_json", "srt", "vtt")
NOT_FOR_FILES = frozenset(
    {"host", "port", "api_key", "root_path", "cors_origins", "ssl_certfile", "ssl_keyfile"}
)


@click.command()
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
@settings_options(leave_out=NOT_FOR_FILES)
def transcribe(
    files: tuple[Path, ...],
    response_format: ResponseFormat,
    language: str | None,
    output_dir: Path | None,
    **options: Any,
) -> None:
    """Transcribes FILES without a server."""
    settings = settings_from(options, FOR_A_MODEL)
    configure_logging("error" if settings.log_level == "info" else settings.log_level)
    from asr_server.offline import transcribe_files

    if not transcribe_files(settings, files, response_format, language, output_dir):
        sys.exit(1)
