"""Read `--models`: the models of one server, with their differing settings. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from asr_server.cli.checks import Check, problem
from asr_server.cli.options import (
    SettingsError,
    checked_settings,
    configure_log,
    exit_with,
    is_flag_given,
    settings_from,
)
from asr_server.server.settings import ServerSettings

# ServerSettings that a model in the file may have of its own; beside them stand its `name` and `aliases`.
PER_MODEL: Final = (
    *("model", "device", "dtype", "replicas", "replicas_per_device", "tensor_parallel_size"),
    *("cpu_threads", "max_slots", "short_audio", "kernels"),
    *("beam_size", "max_fallbacks", "check_voice"),
    *("load", "idle_unload_s"),
)
_KEYS: Final = ("name", "aliases", *PER_MODEL)


def settings_of_models(
    options: dict[str, Any], checks: tuple[Check, ...], model_name: str | None
) -> list[ServerSettings]:
    """Return each model's settings, the default first. Wrong ones end the command."""
    if not options["models"]:
        return [settings_from(options, checks, model_name)]
    try:
        entries = list(read_models(options["models"]))
        if model_name or is_flag_given("model") or is_flag_given("served_model_name"):
            raise ValueError("names the models: leave out MODEL, --model and --served-model-name")
    except (OSError, ValueError) as error:
        exit_with([problem("models", options["models"], str(error))])
    models, problems = [], []
    for number, entry in enumerate(entries):
        try:
            models.append(checked_settings(options | entry, checks, None if number else configure_log))
        except SettingsError as error:
            name = entry["served_model_name"] or entry["model"]
            problems += [f"model {name}: {line}" for line in error.problems]
    uses = Counter(name for model in models for name in model.model_names)
    problems += [
        problem("models", options["models"], f"{name} is the name of {count} models")
        for name, count in uses.items()
        if count > 1
    ]
    if problems:
        exit_with(problems)
    return models


def read_models(text: str) -> Iterator[dict[str, Any]]:
    """Yield each model's differing settings. Raises OSError, ValueError."""
    is_file = text.endswith((".yaml", ".yml"))
    entries = _entries_of_file(Path(text)) if is_file else map(_entry, text.split(","))
    for number, entry in enumerate(entries):
        yield _settings(entry, is_first=number == 0)


def _entry(text: str) -> dict[str, Any]:
    name, _, model = text.strip().rpartition("=")
    if not model:
        raise ValueError(f"must be name=MODEL,name=MODEL, and {text!r} names no model")
    return {"name": name, "model": model}


def _entries_of_file(path: Path) -> list[dict[str, Any]]:
    import yaml  # takes a while, and few need it

    try:
        entries = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the file is not YAML: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError("the file must be a list of models, each with its name")
    for number, entry in enumerate(entries, 1):
        _check_entry(number, entry)
    return entries


def _check_entry(number: int, entry: Any) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"model {number} of the file has no name")
    if unknown := [str(key) for key in entry if key not in _KEYS]:
        raise ValueError(f"{entry['name']} has the unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    aliases = entry.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ValueError(f"the aliases of {entry['name']} must be a list of names")


def _settings(entry: Mapping[str, Any], is_first: bool) -> dict[str, Any]:
    settings = {key: value for key, value in entry.items() if key in PER_MODEL}
    settings |= {"served_model_name": entry["name"], "model": entry.get("model", entry["name"])}
    if not is_first or "aliases" in entry:
        settings["model_alias"] = ",".join(entry.get("aliases", []))
    return settings
