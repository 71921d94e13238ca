"""`asr-server serve`."""

from __future__ import annotations

from typing import Any

import click

from asr_server.cli.options import settings_from, settings_options
from asr_server.config import EMBEDDED_MODEL
from asr_server.preflight import FOR_A_SERVER
from asr_server.telemetry import configure_logging

NEXT_STEP = (
    "serving the embedded model whisper-digits, which hears English digits only; "
    "the next step is --model openai/whisper-large-v3-turbo"
)


@click.command()
@click.argument("model_name", metavar="[MODEL]", required=False)
@settings_options()
def serve(model_name: str | None, **options: Any) -> None:
    """Serves MODEL: a Whisper checkpoint's directory or Hugging Face hub name (the same as --model)."""
    settings = settings_from(options, FOR_A_SERVER, model_name)
    configure_logging(settings.log_level)
    if settings.model == str(EMBEDDED_MODEL):
        click.echo(NEXT_STEP, err=True)
    from asr_server.api.server import run

    run(settings)
