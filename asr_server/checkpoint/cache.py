"""Where models lie on this machine, and what the names of their folders say.

HF_HOME moves the Hugging Face cache and the server's own beside it. In the latter `models/NAME@REVISION`
holds fetched models, `readings/` the directories made for other programs' files, `triton/` a GPU's compiled
kernels.
"""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from asr_server.checkpoint.files import STORED, read_optional_json
from asr_server.config import EMBEDDED_MODEL

MODELS = "models"
TEXTS_ONLY = "-texts"  # behind the folder's name of a model whose weights were not fetched


def hub_cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(given) if given else _home() / "hub"


def own_cache() -> Path:
    """Return the folder of the models that this server has fetched; it may not exist."""
    return _home() / "asr-server"


def writable(folder: str) -> Path:
    """Return a subfolder of the own cache; in a read-only container, a temporary folder."""
    path = own_cache() / folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return _temporary()


def why_not_kept() -> str:
    """Return why a model that is fetched would be lost at this process's end, else an empty text."""
    if writable(MODELS).parent == own_cache():
        return ""
    return (
        f"{own_cache() / MODELS} cannot be written, and what is fetched is lost at the end: "
        "set HF_HOME to another folder"
    )


@cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="asr-server-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _home() -> Path:
    """Find HF_HOME as huggingface_hub does, without its slow import."""
    given = os.environ.get("HF_HOME")
    return _expanded(given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def repository_and_revision(directory: Path) -> tuple[str, str]:
    """Return the repository and commit of a fetched folder, else empty texts."""
    if directory.parent.name != MODELS or "@" not in directory.name:
        return "", ""
    repository, _, revision = directory.name.partition("@")
    return repository.replace("--", "/"), revision.removesuffix(TEXTS_ONLY)


def source_of(directory: Path) -> Path:
    note = read_optional_json(directory / STORED)
    return Path(note["source"]) if note else directory


def revision_of(directory: Path) -> str:
    if noted := read_optional_json(directory / STORED).get("revision"):  # `adopt` made the directory
        return str(noted)
    return directory.name if directory.parent.name == "snapshots" else repository_and_revision(directory)[1]


def name_elsewhere(directory: Path) -> str:
    """Return the name by which another host finds this checkpoint: a path only if it is in no cache."""
    if directory == EMBEDDED_MODEL:
        return EMBEDDED_MODEL.name
    source = source_of(directory)
    if repository := repository_and_revision(source)[0]:
        return repository
    folder = source.parent.parent.name  # models--openai--whisper-small/snapshots/COMMIT
    if source.parent.name == "snapshots" and folder.startswith("models--"):
        return folder.removeprefix("models--").replace("--", "/")
    return str(source.absolute())
