"""Find a checkpoint by name: on disk, in the caches, or by fetching it. No other file does this.

Other programs' formats are found as the directory made for them (`adopt.py`). May wait for a download.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asr_server.annexes.model_sources import names
from asr_server.annexes.model_sources.adopt import adopt
from asr_server.annexes.model_sources.fetch import fetch, fetched
from asr_server.annexes.model_sources.foreign import check_foreign_file, explain_listing, is_ctranslate2
from asr_server.checkpoint.files import INDEX, hub_cache, read_json, read_optional_json, reading, revision_of
from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tensors import check_weights
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError

_OPTIONAL = (
    *("tokenizer.json", "vocab.json", "added_tokens.json"),
    *("generation_config.json", "preprocessor_config.json", INDEX),
)


def check_directory(directory: Path) -> None:
    """Check names, sizes and headers. Raises CheckpointError for what is no whole Whisper checkpoint."""
    if explanation := explain_listing(str(directory), _files(directory)):
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
    missing = [name for name in ("vocab.json", "merges.txt") if not (directory / name).exists()]
    if not missing or (directory / "tokenizer.json").exists():
        return
    advice = "Take that of the model it was trained from"
    if base := names.base_model(config):
        advice += f", perhaps: hf download openai/whisper-{base} tokenizer.json --local-dir {directory}"
    raise CheckpointError(
        f"{directory} has no tokenizer.json (nor, instead of it, {' and '.join(missing)}). {advice}"
    )


def resolve_checkpoint(name: str) -> Path:
    """Return a complete checkpoint's directory for a directory, file, hub name or short name; fetch it.

    Raises CheckpointError: there is none, it is of another kind, or a file is missing.
    """
    return checkpoint_on_disk(name) or _usable(fetch(names.published(name)))


def checkpoint_on_disk(name: str) -> Path | None:
    """Return the checkpoint's directory, or None if it must be downloaded. Raises CheckpointError."""
    path = Path(os.path.expanduser(name))
    if name == EMBEDDED_MODEL.name and not path.exists():
        return EMBEDDED_MODEL
    if os.path.isfile(path):  # Path's own tests raise where a name is too long for the disk
        check_foreign_file(path)
        return _usable(path)
    if os.path.isdir(path) and (name not in names.SHORT_NAMES or (path / "config.json").exists()):
        return _usable(path)
    names.check_hub_name(name)
    return cached(names.published(name))


def cached(model: names.Published) -> Path | None:
    for directory in _copies(model):
        try:
            return _usable(directory)
        except CheckpointError:  # not whole, or of a layout that this server cannot read
            continue
    return None


def tokenizer_of(name: str) -> Path:
    """Return a directory with the checkpoint's tokenizer and rules of generation. Raises CheckpointError."""
    return checkpoint_on_disk(name) or fetch(names.published(name), with_weights=False)


def _copies(model: names.Published) -> Iterator[Path]:
    if found := fetched(model):
        yield found
    for repository in (model.repository, *model.cached):
        folder = hub_cache() / f"models--{repository.replace('/', '--')}"
        head = folder / "refs" / "main"
        commits = [model.revision, head.read_text().strip() if head.is_file() else ""]
        snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
        yield from sorted(snapshots, key=lambda path: (path.name not in commits, -path.stat().st_mtime))


def _usable(path: Path) -> Path:
    if path.is_file() or is_ctranslate2(_files(path)):
        path = adopt(path, tokenizer_of, revision_of(path))
    check_directory(path)
    read_window(path)
    return path


def _files(directory: Path) -> list[str]:
    with reading(directory):
        return os.listdir(directory)
