"""Whether a directory holds all the files of a Hugging Face Whisper checkpoint, and holds them whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from asr_server.checkpoint.error import CheckpointError
from asr_server.checkpoint.foreign import explain_listing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"

_OPTIONAL = (
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    "generation_config.json",
    "preprocessor_config.json",
)
_GIT_LFS = b"version https://git-lfs"
_WIDTHS = {384: "tiny", 512: "base", 768: "small", 1024: "medium", 1280: "large-v2"}  # by d_model
_ENGLISH_VOCABULARY, _LARGE_V3_VOCABULARY = 51864, 51866
_TURBO_LAYERS = 4


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
        if (directory / name).exists():
            read_json(directory / name)
    _check_tokenizer(directory, config)
    for file in _weight_files(directory):
        _check_weights(directory / file)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what it should be (a JSON object): fetch it again")
    return content


def _check_tokenizer(directory: Path, config: dict[str, Any]) -> None:
    if (directory / "tokenizer.json").exists():
        return
    missing = [name for name in ("vocab.json", "merges.txt") if not (directory / name).exists()]
    if missing:
        base = base_model(config)
        raise CheckpointError(
            f"{directory} has no tokenizer.json (nor, instead of it, {' and '.join(missing)}). Take that of "
            "the model it was trained from, perhaps: "
            f"hf download {base} tokenizer.json --local-dir {directory}"
        )


def base_model(config: dict[str, Any]) -> str:
    """The published model of this width and vocabulary, from which a fine-tuned one most likely comes."""
    size, vocabulary = _WIDTHS.get(config.get("d_model", 0), "large-v3"), config.get("vocab_size")
    if vocabulary == _LARGE_V3_VOCABULARY:
        size = "large-v3-turbo" if config.get("decoder_layers") == _TURBO_LAYERS else "large-v3"
    return f"openai/whisper-{size}" + (".en" if vocabulary == _ENGLISH_VOCABULARY else "")


def _weight_files(directory: Path) -> list[str]:
    if (directory / INDEX).exists():
        return sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
    for name in (SINGLE, PICKLED):
        if (directory / name).exists():
            return [name]
    raise CheckpointError(f"{directory} has no weights: neither {SINGLE}, {INDEX} nor {PICKLED}")


def _check_weights(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(len(_GIT_LFS))
            if head == _GIT_LFS:
                raise CheckpointError(f"{path} is only a pointer to the weights: run `git lfs pull` there")
            if path.suffix == ".safetensors" and path.stat().st_size < _promised_bytes(path):
                raise CheckpointError(f"{path} is cut short: fetch it again")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _promised_bytes(path: Path) -> int:
    """The size of a safetensors file by its header: eight bytes of length, a JSON object, the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return length
        try:
            tensors = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file: fetch it again") from error
    return 8 + length + max(ends, default=0)
