"""The command `asr-server align`: when each word of a text is said in a recording, on this machine."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from asr_server.cli import options as shared
from asr_server.cli.checks import FOR_A_MODEL
from asr_server.cli.transcribe import SETTINGS
from asr_server.errors import ChunkFailed, EngineUnavailable, RequestError
from asr_server.server.settings import SECTIONS

if TYPE_CHECKING:
    from asr_server.annexes.alignment.align import Alignment
    from asr_server.annexes.alignment.bodies import Granularity
    from asr_server.annexes.offline.local import LocalTranscriber

FAILED: Final = 1
FORMATS: Final = ("srt", "vtt", "json")
_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(
    cls=shared.SectionedCommand,
    sections=SECTIONS,
    short_help="Says when each word of a text is said in a recording.",
)
@click.argument("recording", type=_FILE)
@click.argument("text", type=_FILE)
@click.option("-f", "--format", "output_format", type=click.Choice(FORMATS), default="srt", show_default=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="[default: standard output]"
)
@shared.language_option()
@shared.choice_option("--granularity", ("word", "character"), "what gets times in json")
@shared.settings_options(SETTINGS)
def align(
    recording: Path,
    text: Path,
    output_format: str,
    output: Path | None,
    language: str | None,
    granularity: Granularity,
    **options: Any,
) -> None:
    """Aligns TEXT, a file in UTF-8, with RECORDING, and writes subtitles of it or its times.

    \b
    asr-server align talk.mp3 talk.txt --format srt

    What of the text nobody says is left out of subtitles; it is counted on standard error, and so is what
    is said besides. Exit status: 0, aligned; 1, not; 2, wrongly called.
    """
    from asr_server.annexes.alignment.align import require_words
    from asr_server.annexes.alignment.bodies import rendered
    from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob

    shared.log_errors_alone(options)
    try:
        given = text.read_text("utf-8")
        require_words(given)
        job = TranscribeJob((str(recording),), word_timestamps=True, language=language)
        transcriber = LocalTranscriber(shared.settings_from(options, FOR_A_MODEL), job)
        alignment = asyncio.run(_align(transcriber, recording, given))
        content = rendered(alignment, output_format, granularity)
        if output is None:
            click.echo(content, nl=False)
        else:
            output.write_text(content, "utf-8")
    except UnicodeDecodeError:
        shared.exit_with([f"{text} is not UTF-8 text."])
    except (RequestError, ChunkFailed, EngineUnavailable, OSError) as error:
        shared.print_error(error)
        sys.exit(FAILED)
    _report(alignment)


async def _align(local: LocalTranscriber, path: Path, text: str) -> Alignment:
    from asr_server.annexes.alignment.align import align as align_text

    async with local.running():
        transcript = await local.transcribe(path, lambda done_s, total_s: None)
        return await align_text(text, transcript, local.transcriber, partial(local.recording, path))


def _report(alignment: Alignment) -> None:
    for number, of in (
        (sum(not word.is_spoken for word in alignment.words), "words of the text are not spoken"),
        (len(alignment.not_in_text), "stretches of speech are not in the text"),
    ):
        if number:
            click.echo(f"{number} {of}", err=True)
