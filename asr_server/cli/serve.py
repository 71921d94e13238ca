"""`asr-server serve`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from asr_server.checkpoint import CheckpointError
from asr_server.cli.options import WRONG_USAGE, settings_from, settings_options
from asr_server.config import EMBEDDED_MODEL_LIMIT
from asr_server.preflight import FOR_A_SERVER
from asr_server.telemetry import configure_logging

logger = logging.getLogger(__name__)

NEXT_STEP = (
    f"serving the embedded model whisper-digits, which {EMBEDDED_MODEL_LIMIT}; "
    "the next step is --model openai/whisper-large-v3-turbo"
)


@click.command()
@click.argument("model_name", metavar="[MODEL]", required=False)
@settings_options()
def serve(model_name: str | None, **options: Any) -> None:
    """Serves MODEL: a Whisper checkpoint's directory or Hugging Face hub name (the same as --model)."""
    settings = settings_from(options, FOR_A_SERVER, model_name)
    configure_logging(settings.log_level, settings.log_format)
    if settings.serves_embedded_model:
        logger.info(NEXT_STEP)
    from asr_server.api.server import run

    try:
        status = run(settings)
    except CheckpointError as error:
        click.echo(f"Error: {error}", err=True)
        status = WRONG_USAGE
    sys.exit(status)
