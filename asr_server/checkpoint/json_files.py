"""Reads the JSON files of a checkpoint, for every package that has to know something of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asr_server.checkpoint.error import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where there is no such file, or no JSON object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what it should be (a JSON object): fetch it again")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """The same, but empty where there is no such file."""
    return read_json(path) if path.exists() else {}
