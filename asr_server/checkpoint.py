"""Where a checkpoint's files are. No torch: the API process needs them too, for the tokenizer."""

from __future__ import annotations

from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
_PATTERNS = ["*.json", "*.txt", "*.safetensors"]


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
        has_safetensors = SINGLE in files or INDEX in files
        weights = [SINGLE] if SINGLE in files else ["model-*.safetensors"]
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.txt", *(weights if has_safetensors else [PICKLED])]
            )
        )
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no directory here, and the Hugging Face hub cannot give it: {error}"
        ) from error
