"""`asr-server serve`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from asr_server.checkpoint import CheckpointError
from asr_server.cli.options import WRONG_USAGE, settings_from, settings_options
from asr_server.config import DEFAULT_MODEL, EMBEDDED_MODEL_LIMIT, Settings
from asr_server.preflight import FOR_A_SERVER
from asr_server.telemetry import configure_logging

logger = logging.getLogger(__name__)


@click.command()
@click.argument("model_name", metavar="[MODEL]", required=False)
@settings_options()
def serve(model_name: str | None, **options: Any) -> None:
    """Serves MODEL: a short name (`asr-server models` lists them), a Hugging Face hub name, a directory or a
    file (the same as --model).
    """
    settings = settings_from(options, FOR_A_SERVER, model_name, _configure_logging)
    if settings.why_embedded:
        logger.warning(
            "serving the embedded model whisper-digits, which %s, because %s could not be had: %s",
            EMBEDDED_MODEL_LIMIT,
            DEFAULT_MODEL,
            settings.why_embedded,
        )
    elif settings.serves_embedded_model:
        logger.info("serving the embedded model whisper-digits, which %s", EMBEDDED_MODEL_LIMIT)
    from asr_server.api.server import run

    try:
        status = run(settings)
    except CheckpointError as error:
        click.echo(f"Error: {error}", err=True)
        status = WRONG_USAGE
    sys.exit(status)


def _configure_logging(settings: Settings) -> None:
    """Before a model is fetched, which the log tells of."""
    configure_logging(settings.log_level, settings.log_format)
