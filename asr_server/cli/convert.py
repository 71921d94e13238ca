"""Defines the command `asr-server convert`. The work is done in `asr_server.convert`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from asr_server.checkpoint import CheckpointError
from asr_server.cli.options import WRONG_USAGE


@click.command(short_help="Makes a checkpoint of a .pt or ggml file.")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("target", metavar="DIRECTORY", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    metavar="MODEL",
    help="whose tokenizer to take, a directory or a name  [default: the published model of its size]",
)
def convert(source: Path, target: Path, tokenizer: str | None) -> None:
    """Makes DIRECTORY, which can be served, of FILE: a .pt of openai-whisper or a ggml model of whisper.cpp.

    \b
    asr-server convert my-small.pt my-whisper-small
    asr-server serve ./my-whisper-small
    """
    try:
        from asr_server.convert import convert as convert_file

        convert_file(source, target, tokenizer)
    except (CheckpointError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(WRONG_USAGE)
    click.echo(f"{target} can be served: asr-server serve ./{target}")
