"""Where a checkpoint's files are, and what is wrong with them, before anything heavy starts.

No torch: the API process needs them too, for the tokenizer. Every error is one line that says what to do.
"""

from __future__ import annotations

import os
from pathlib import Path

from asr_server.checkpoint.error import CheckpointError
from asr_server.checkpoint.files import base_model, check_directory
from asr_server.checkpoint.foreign import explain_file
from asr_server.checkpoint.hub import fetch
from asr_server.checkpoint.json_files import read_json, read_optional_json
from asr_server.checkpoint.names import check_hub_name, hub_name
from asr_server.checkpoint.weights import INDEX, PICKLED, SINGLE
from asr_server.checkpoint.window import AudioWindow
from asr_server.config import EMBEDDED_MODEL

__all__ = [
    "INDEX",
    "PICKLED",
    "SINGLE",
    "AudioWindow",
    "CheckpointError",
    "base_model",
    "check_directory",
    "checkpoint_on_disk",
    "fetch",
    "hub_name",
    "name_elsewhere",
    "read_json",
    "read_optional_json",
    "resolve_checkpoint",
    "revision_of",
]


def resolve_checkpoint(name: str) -> Path:
    """The directory of a complete checkpoint given as a directory, a hub name or a short name (`large-v3`).

    What the hub has is fetched if need be.

    Raises:
        CheckpointError: there is no such checkpoint, it is of another kind, or a file of it is missing.
    """
    directory = checkpoint_on_disk(name)
    if directory is None:
        directory = fetch(hub_name(name))
        _check(directory)
    return directory


def revision_of(directory: Path) -> str:
    """The hub's commit that a checkpoint in its cache is of; empty for any other directory."""
    return directory.name if directory.parent.name == "snapshots" else ""


def name_elsewhere(directory: Path) -> str:
    """What finds this checkpoint on another host.

    The embedded one and the hub's lie in other places there; any other directory must have the same path.
    """
    if directory == EMBEDDED_MODEL:
        return EMBEDDED_MODEL.name
    repository = directory.parent.parent.name  # models--openai--whisper-small/snapshots/COMMIT
    if revision_of(directory) and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return str(directory.absolute())


def checkpoint_on_disk(name: str) -> Path | None:
    """The same without asking the hub: None for what only the hub can have. Raises CheckpointError."""
    path = Path(os.path.expanduser(name))
    if name == EMBEDDED_MODEL.name and not path.exists():
        return EMBEDDED_MODEL
    if path.is_file():
        raise CheckpointError(explain_file(path))
    if not path.is_dir():
        check_hub_name(name)
        return None
    _check(path)
    return path


def _check(directory: Path) -> None:
    check_directory(directory)
    AudioWindow.from_directory(directory)
