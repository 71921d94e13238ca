"""Defines the command `asr-server convert`. The work is done in `asr_server.model.convert`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from asr_server.checkpoint import CheckpointError
from asr_server.cli.options import WRONG_USAGE


@click.command(short_help="Makes a checkpoint in Hugging Face's layout of a .pt, ggml or CTranslate2 model.")
@click.argument("source", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("target", metavar="DIRECTORY", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    metavar="CHECKPOINT",
    help="whose tokenizer to take, a directory or a name  [default: its own, or the published one's]",
)
def convert(source: Path, target: Path, tokenizer: str | None) -> None:
    """Makes DIRECTORY, in Hugging Face's layout, of MODEL: a .pt of openai-whisper, a ggml file of
    whisper.cpp or a CTranslate2 folder. The server needs no conversion: it reads all of these.

    \b
    asr-server convert my-small.pt my-whisper-small
    """
    try:
        from asr_server.model.convert import convert as convert_file

        convert_file(source, target, tokenizer)
    except (CheckpointError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(WRONG_USAGE)
    click.echo(f"{target} is a checkpoint in Hugging Face's layout")
