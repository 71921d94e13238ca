"""The commands `asr-server models` and `asr-server convert`."""

import sys
from pathlib import Path

import click

from asr_server.cli import options as shared
from asr_server.errors import CheckpointError
from asr_server.telemetry import configure_logging

_MB, _GB = 1e6, 1e9


@click.group(invoke_without_command=True, short_help="Lists the published models, and fetches them.")
@click.pass_context
def models(ctx: click.Context) -> None:
    """Lists the models that have a short name: size, languages, and where those lie that are here.

    \b
    asr-server models
    asr-server models fetch base turbo
    """
    if ctx.invoked_subcommand is None:
        _list()


@models.command(short_help="Fetches models, so that the server finds them here.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def fetch(names: tuple[str, ...]) -> None:
    """Fetches each NAME, a short name or one on the Hugging Face hub, unless it is here; says where it lies.

    What has arrived is kept when it breaks off: call it again. Each file is checked by its sha256.
    """
    from asr_server.annexes.model_sources.find import checkpoint_on_disk, resolve_checkpoint
    from asr_server.checkpoint.files import source_of, why_not_kept

    configure_logging("info")
    failed = False
    for name in names:
        try:
            if checkpoint_on_disk(name) is None and (reason := why_not_kept()):
                raise CheckpointError(f"{name} is not fetched: {reason}")
            click.echo(source_of(resolve_checkpoint(name)))
        except CheckpointError as error:
            shared.print_error(error)
            failed = True
    if failed:
        sys.exit(shared.WRONG_USAGE)


def _list() -> None:
    from asr_server.annexes.model_sources.find import cached
    from asr_server.annexes.model_sources.names import SHORT_NAMES, Published
    from asr_server.checkpoint.files import own_cache, source_of
    from asr_server.config import EMBEDDED_MODEL

    names: dict[Published, list[str]] = {}
    for name, model in SHORT_NAMES.items():
        names.setdefault(model, []).append(name)
    rows = [("NAME", "SIZE", "LANGUAGES", "HERE")]
    for model, its_names in names.items():
        directory = cached(model)
        languages = "English" if model.num_languages == 1 else f"{model.num_languages}"
        where = str(source_of(directory)) if directory else "-"
        rows.append((", ".join(its_names), _size(model.num_bytes), languages, where))
    rows.append((EMBEDDED_MODEL.name, "2 MB", "English digits", "part of this server"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[3]]))
    click.echo(f"\nAny other model: its name on the hub, a directory or a file. Fetched into {own_cache()}.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.1f} GB" if num_bytes >= _GB else f"{num_bytes / _MB:.0f} MB"


@click.command(short_help="Makes a checkpoint in Hugging Face's layout of a .pt, ggml or CTranslate2 model.")
@click.argument("source", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("target", metavar="DIRECTORY", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    metavar="CHECKPOINT",
    help="source of the tokenizer, a directory or a name  [default: its own, or the published one's]",
)
def convert(source: Path, target: Path, tokenizer: str | None) -> None:
    """Makes DIRECTORY, in Hugging Face's layout, of MODEL: a .pt of openai-whisper, a ggml file of
    whisper.cpp or a CTranslate2 folder. The server needs no conversion: it reads all of these.

    \b
    asr-server convert my-small.pt my-whisper-small
    """
    try:
        from asr_server.annexes.model_sources.convert import convert as convert_file

        convert_file(source, target, tokenizer)
    except (CheckpointError, OSError) as error:
        shared.exit_with([str(error)])
    click.echo(f"{target} is a checkpoint in Hugging Face's layout")
