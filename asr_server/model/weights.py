"""From a checkpoint's name to a model with its weights, which stay as Hugging Face publishes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from asr_server.model.sizes import WhisperSizes
from asr_server.model.whisper import Whisper

_PATTERNS = ["*.json", "*.txt", "*.safetensors"]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = "pytorch_model.bin"


class CheckpointError(Exception):
    """The checkpoint is not there, incomplete, or not Whisper."""


def resolve_checkpoint(name: str) -> Path:
    """The directory of a checkpoint given as a directory or as a hub name, fetched if need be.

    Raises:
        CheckpointError: neither a directory with a config.json nor anything the hub can give.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise CheckpointError(f"{directory} has no config.json: not a Hugging Face checkpoint")
        return directory
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"there is no directory {directory}")
    return _fetch(name)


def _fetch(name: str) -> Path:
    from huggingface_hub import list_repo_files, snapshot_download

    try:
        try:
            files = list_repo_files(name)
        except Exception:  # offline, perhaps: what was fetched before still serves
            return Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
        has_safetensors = _SINGLE in files or _INDEX in files
        weights = [_SINGLE] if _SINGLE in files else ["model-*.safetensors"]
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.txt", *(weights if has_safetensors else [_PICKLED])])
        )
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no directory here, and the Hugging Face hub cannot give it: {error}"
        ) from error


def load_whisper(directory: Path, device: str | torch.device, dtype: torch.dtype) -> Whisper:
    """The model of a Hugging Face Whisper directory, ready for inference.

    Raises:
        CheckpointError: weights are missing or have other shapes than config.json says.
        ValueError: config.json describes no Whisper model.
    """
    sizes = WhisperSizes.from_directory(directory)
    model = Whisper(sizes, device=torch.device(device), dtype=dtype)
    try:
        model.load_hugging_face(_read_weights(directory))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"the weights in {directory} do not fit its config.json: {error}") from error
    return model.eval().requires_grad_(False)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor by its Hugging Face name, without the leading `model.`."""
    if (directory / _INDEX).exists():
        files = sorted(set(json.loads((directory / _INDEX).read_text())["weight_map"].values()))
        tensors = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    elif (directory / _SINGLE).exists():
        tensors = load_file(directory / _SINGLE)
    elif (directory / _PICKLED).exists():
        tensors = torch.load(directory / _PICKLED, map_location="cpu", weights_only=True)
    else:
        raise CheckpointError(f"{directory} has neither {_SINGLE}, {_INDEX} nor {_PICKLED}")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
