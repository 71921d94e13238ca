"""The commands `asr-server serve`, of one model or several, and `health`, Docker's health check."""

import logging
import signal
import ssl
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from asr_server.annexes.keys.accounts import parse_yaml
from asr_server.cli import options as shared
from asr_server.cli.checks import FOR_A_SERVER, Check, problem
from asr_server.config import DEFAULT_MODEL, EMBEDDED_MODEL_LIMIT
from asr_server.errors import CheckpointError
from asr_server.machine import in_url
from asr_server.server.settings import SECTIONS, ServerSettings

# ServerSettings that a model in the file may have of its own; beside them stand its `name` and `aliases`.
PER_MODEL: Final = (
    *("model", "device", "dtype", "replicas", "tensor_parallel_size", "cpu_threads", "max_slots"),
    *("short_audio", "kernels", "beam_size", "check_voice", "load", "idle_unload_s"),
)
_KEYS: Final = ("name", "aliases", *PER_MODEL)


def settings_of_models(
    options: dict[str, Any], checks: tuple[Check, ...], model_name: str | None
) -> list[ServerSettings]:
    """Return each model's settings, the default first. Wrong ones end the command."""
    if not options["models"]:
        return [shared.settings_from(options, checks, model_name)]
    try:
        entries = list(read_models(options["models"]))
        if model_name or shared.is_flag_given("model") or shared.is_flag_given("served_model_name"):
            raise ValueError("names the models: leave out MODEL, --model and --served-model-name")
    except (OSError, ValueError) as error:
        shared.exit_with([problem("models", options["models"], str(error))])
    models, problems = [], []
    for number, entry in enumerate(entries):
        try:
            before_fetch = None if number else shared.configure_log
            models.append(shared.checked_settings(options | entry, checks, before_fetch))
        except shared.SettingsError as error:
            name = entry["served_model_name"] or entry["model"]
            problems += [f"model {name}: {line}" for line in error.problems]
    uses = Counter(name for model in models for name in model.model_names)
    problems += [
        problem("models", options["models"], f"{name} is the name of {count} models")
        for name, count in uses.items()
        if count > 1
    ]
    if problems:
        shared.exit_with(problems)
    return models


def read_models(text: str) -> Iterator[dict[str, Any]]:
    """Yield each model's differing settings. Raises OSError, ValueError."""
    is_file = text.endswith((".yaml", ".yml"))
    entries = _entries_of_file(Path(text)) if is_file else map(_entry, text.split(","))
    for number, entry in enumerate(entries):
        settings = {key: value for key, value in entry.items() if key in PER_MODEL}
        settings |= {"served_model_name": entry["name"], "model": entry.get("model", entry["name"])}
        if number or "aliases" in entry:
            settings["model_alias"] = ",".join(entry.get("aliases", []))
        yield settings


def _entry(text: str) -> dict[str, Any]:
    name, _, model = text.strip().rpartition("=")
    if not model:
        raise ValueError(f"must be name=MODEL,name=MODEL, and {text!r} names no model")
    return {"name": name, "model": model}


def _entries_of_file(path: Path) -> list[dict[str, Any]]:
    entries = parse_yaml(path.read_bytes())
    if not isinstance(entries, list) or not entries:
        raise ValueError("the file must be a list of models, each with its name")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"model {number} of the file has no name")
        if unknown := [str(key) for key in entry if key not in _KEYS]:
            raise ValueError(f"{entry['name']} has the unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise ValueError(f"the aliases of {entry['name']} must be a list of names")
    return entries


logger = logging.getLogger(__name__)


@click.command(cls=shared.SectionedCommand, sections=SECTIONS)
@click.argument("model_name", metavar="[MODEL]", required=False)
@shared.settings_options()
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
        shared.print_error(error)
        status = shared.WRONG_USAGE
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
        shared.print_error(f"{url}: {error}")
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
