"""The commands `asr-server serve` and `asr-server health`, Docker's health check."""

from __future__ import annotations

import logging
import signal
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any, Final

import click

from asr_server.cli.checks import FOR_A_SERVER
from asr_server.cli.model_list import settings_of_models
from asr_server.cli.options import WRONG_USAGE, SectionedCommand, print_error, settings_options
from asr_server.config import DEFAULT_MODEL, EMBEDDED_MODEL_LIMIT
from asr_server.errors import CheckpointError
from asr_server.machine import in_url
from asr_server.server.settings import SECTIONS, ServerSettings

logger = logging.getLogger(__name__)


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("model_name", metavar="[MODEL]", required=False)
@settings_options()
def serve(model_name: str | None, **options: Any) -> None:
    """Serves MODEL: a short name (`asr-server models` lists them), a Hugging Face hub name, a directory or a
    file (the same as --model).

    \b
    asr-server serve
    asr-server serve --models base,turbo --idle-unload-s 600
    asr-server serve turbo --host 0.0.0.0 --port 9000 --keys-file keys.yaml

    Exit status: 0, stopped by a signal; 1, the engine never started; 2, wrong settings, or a port is taken.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server has a handler of its own
    models = settings_of_models(options, FOR_A_SERVER, model_name)
    for settings in models:
        _report_embedded(settings)
    from asr_server.server.run import run

    try:
        status = run(models)
    except CheckpointError as error:
        print_error(error)
        status = WRONG_USAGE
    sys.exit(status)


def _report_embedded(settings: ServerSettings) -> None:
    if settings.why_embedded:
        logger.warning(
            "serving the embedded model whisper-digits, which %s, because %s could not be had: %s",
            EMBEDDED_MODEL_LIMIT,
            DEFAULT_MODEL,
            settings.why_embedded,
        )
    elif settings.serves_embedded_model:
        logger.info("serving the embedded model whisper-digits, which %s", EMBEDDED_MODEL_LIMIT)


ANSWER_LIMIT_S: Final = 3.0
# What answers at each address that a server may listen on.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # nosec B104 # listens nowhere


@click.command()
@click.option(
    "--pid", default=1, show_default=True, help="the server's process; its flags say where it listens"
)
def health(pid: int) -> None:
    """Ends with status 0 if the server answers /health with 200, else with 1.

    The server is the container's first process; where it listens is read off its flags and the environment.
    """
    url = health_url(_arguments_of(pid))
    unverified = ssl._create_unverified_context()  # nosec B323 # the certificate has the name for clients
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # HTTP_PROXY is for other hosts
        urllib.request.HTTPSHandler(context=unverified),
    )
    try:
        opener.open(url, timeout=ANSWER_LIMIT_S).close()
    except OSError as error:
        print_error(f"{url}: {error}")
        sys.exit(1)


def _arguments_of(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except OSError:
        return []
    return words[words.index("serve") + 1 :] if "serve" in words else []


def health_url(arguments: list[str]) -> str:
    settings = serve.make_context("serve", arguments, resilient_parsing=True).params
    host = _LOOPBACK.get(settings["host"], settings["host"])
    scheme = "https" if settings["ssl_certfile"] else "http"
    return f"{scheme}://{in_url(host)}:{settings['port']}/health"
