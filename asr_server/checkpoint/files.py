"""Checks that a directory holds all the files of a Hugging Face Whisper checkpoint.

Called before anything starts, for directories of the user and of the hub's cache. Loads no weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from asr_server.checkpoint.error import CheckpointError
from asr_server.checkpoint.foreign import explain_listing
from asr_server.checkpoint.json_files import read_json, read_optional_json
from asr_server.checkpoint.names import base_model
from asr_server.checkpoint.weights import INDEX, check_weights

_OPTIONAL = (
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    "generation_config.json",
    "preprocessor_config.json",
    INDEX,
)


def check_directory(directory: Path) -> None:
    """Reads names, sizes and headers only.

    Raises:
        CheckpointError: it is no Whisper checkpoint, or a file is missing or cut short.
    """
    try:
        explanation = explain_listing(str(directory), os.listdir(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    if explanation:
        raise CheckpointError(explanation)
    if not (directory / "config.json").exists():
        raise CheckpointError(f"{directory} has no config.json: it is no Hugging Face checkpoint")
    config = read_json(directory / "config.json")
    if config.get("model_type") != "whisper":
        raise CheckpointError(f"{directory} holds a {config.get('model_type')!r} model, not a Whisper one")
    for name in _OPTIONAL:
        read_optional_json(directory / name)
    _check_tokenizer(directory, config)
    check_weights(directory, config)


def _check_tokenizer(directory: Path, config: dict[str, Any]) -> None:
    if (directory / "tokenizer.json").exists():
        return
    missing = [name for name in ("vocab.json", "merges.txt") if not (directory / name).exists()]
    if not missing:
        return
    base = base_model(config)
    command = (
        f", perhaps: hf download openai/whisper-{base} tokenizer.json --local-dir {directory}" if base else ""
    )
    raise CheckpointError(
        f"{directory} has no tokenizer.json (nor, instead of it, {' and '.join(missing)}). "
        f"Take that of the model it was trained from{command}"
    )
