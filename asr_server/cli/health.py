"""`asr-server health`: asks the server of this container whether it is alive, for Docker's health check."""

from __future__ import annotations

import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Final

import click

from asr_server.cli.serve import serve

ANSWER_LIMIT_S: Final = 3.0
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@click.command()
@click.option(
    "--pid", default=1, show_default=True, help="process of the server, whose flags say where it listens"
)
def health(pid: int) -> None:
    """Ends with status 0 if the server answers /health with 200, else with 1.

    The server is the container's first process; where it listens is read off its flags and the environment.
    """
    url = _url(_arguments_of(pid))
    unverified = ssl._create_unverified_context()  # the certificate is for the name that clients use
    try:
        urllib.request.urlopen(url, timeout=ANSWER_LIMIT_S, context=unverified).close()
    except OSError as error:
        click.echo(f"Error: {url}: {error}", err=True)
        sys.exit(1)


def _arguments_of(pid: int) -> list[str]:
    """What follows `serve` on the command line of the process; nothing where there is no such process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []
    return words[words.index("serve") + 1 :] if "serve" in words else []


def _url(arguments: list[str]) -> str:
    settings = serve.make_context("serve", arguments, resilient_parsing=True).params
    host = _LOOPBACK.get(settings["host"], settings["host"])
    scheme = "https" if settings["ssl_certfile"] else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings['port']}/health"
