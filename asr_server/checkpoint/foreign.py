"""Recognises what is no checkpoint that can be served, so that the refusal can say what to use.

Used by `files.py`, `find.py` and `hub.py`. Looks at names and the first bytes only.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asr_server.checkpoint.names import published_name

_GGUF = b"GGUF"


def explain_file(path: Path) -> str:
    """Why this file cannot be served, and what to do."""
    with path.open("rb") as file:
        is_gguf = file.read(len(_GGUF)) == _GGUF
    if is_gguf:
        return f"{path} is a GGUF model. {_use_original(path.name)}"
    if (path.parent / "config.json").exists():
        return f"{path} is a file: name the directory it is in, --model {path.parent}"
    return (
        f"{path} is no model: a .pt of openai-whisper, a ggml file of whisper.cpp, or a directory with "
        "config.json and weights is one"
    )


def explain_listing(name: str, files: Collection[str]) -> str | None:
    """The same for a directory or a hub repository, by its files' names; None where it can be served."""
    endings = {Path(file).suffix for file in files}
    if "model.bin" in files and any(file.startswith("vocabulary.") for file in files):
        return None if "config.json" in files else f"{name} has no config.json"
    if any(file.endswith(".safetensors") or file == "pytorch_model.bin" for file in files):
        return None if "config.json" in files else f"{name} has no config.json"
    if single := [file for file in files if file.startswith("ggml-") or file.endswith((".pt", ".pth"))]:
        return f"{name} holds single files, such as {min(single)}: fetch one and name it, --model FILE"
    if ".gguf" in endings:
        return f"{name} holds GGUF models. {_use_original(name)}"
    if ".npz" in endings:
        return f"{name} is an MLX model. {_use_original(name)}"
    return None


def _use_original(name: str) -> str:
    """They are made from a checkpoint that can be served."""
    published = published_name(name)
    if published:
        return f"Use the model that it was made from: --model {published}"
    return "Use the checkpoint that it was made from: --model DIRECTORY or ORGANISATION/NAME"
