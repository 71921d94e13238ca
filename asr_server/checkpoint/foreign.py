"""Recognises Whisper models in the formats of other programs, so that the refusal can say what to use.

Used by `files.py` and `hub.py`. Looks at names and the first bytes only.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from asr_server.checkpoint.names import published_name

_MAGIC_BYTES = {
    b"lmgg": "a ggml model (whisper.cpp)",
    b"ggml": "a ggml model (whisper.cpp)",
    b"GGUF": "a GGUF model (whisper.cpp)",
}


def explain_file(path: Path) -> str:
    """Why this file is no checkpoint directory, and what to do."""
    if path.suffix in (".pt", ".pth"):
        return _explain_openai(path)
    with path.open("rb") as file:
        kind = _MAGIC_BYTES.get(file.read(4))
    if kind:
        return (
            f"{path} is {kind}. {_use_original(path.name)}; or, unless it is quantized, `{_conversion(path)}`"
        )
    if (path.parent / "config.json").exists():
        return f"{path} is a file: name the directory it is in, --model {path.parent}"
    return f"{path} is a file, and a checkpoint is a directory with config.json and model.safetensors in it"


def explain_listing(name: str, files: Collection[str]) -> str | None:
    """The same for a directory or a hub repository, by its files' names; None where it is Hugging Face's."""
    endings = {Path(file).suffix for file in files}
    if "model.bin" in files and any(file.startswith("vocabulary.") for file in files):
        return f"{name} is a CTranslate2 model (faster-whisper). {_use_original(name)}"
    if any(file.endswith(".safetensors") or file == "pytorch_model.bin" for file in files):
        return None if "config.json" in files else f"{name} has no config.json"
    if any(file.startswith("ggml-") for file in files) or ".gguf" in endings:
        return f"{name} holds ggml models (whisper.cpp). {_use_original(name)}"
    if ".npz" in endings:
        return f"{name} is an MLX model. {_use_original(name)}"
    if ".pt" in endings and "config.json" not in files:
        return _explain_openai(Path(name) / next(file for file in files if file.endswith(".pt")))
    return None


def _explain_openai(path: Path) -> str:
    published = published_name(path.stem)
    use = f"use --model {published}" if published == path.stem else f"run `{_conversion(path)}`"
    return f"{path} is a checkpoint of the openai-whisper package: {use}"


def _conversion(path: Path) -> str:
    """The command that makes a directory beside the file."""
    return f"asr-server convert {shlex.quote(str(path))} {shlex.quote(str(path.with_suffix('')))}"


def _use_original(name: str) -> str:
    """They are made from a checkpoint in Hugging Face's layout, which is what serves."""
    published = published_name(name)
    if published:
        return f"Use the checkpoint that it was made from: --model {published}"
    return "Use the Hugging Face checkpoint that it was made from: --model DIRECTORY or ORGANISATION/NAME"
