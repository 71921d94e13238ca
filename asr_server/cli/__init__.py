"""The command `asr-server`: turns flags into settings and calls what does the work."""

import click

from asr_server import __version__
from asr_server.cli.align import align
from asr_server.cli.models import convert, models
from asr_server.cli.serve import health, serve
from asr_server.cli.transcribe import transcribe


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """A speech-to-text server that speaks OpenAI's audio API."""


for command in (serve, transcribe, align, models, convert, health):
    main.add_command(command)
