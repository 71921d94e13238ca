"""Read a checkpoint's small files, and find the folders that hold checkpoints on this machine.

A checkpoint's author is not trusted: files must be regular and bounded.

HF_HOME moves the Hugging Face cache and the server's own beside it. In the latter `models/NAME@REVISION`
holds fetched models, `readings/` the directories made for other programs' files, `triton/` a GPU's compiled
kernels.
"""

import atexit
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError

# The largest, tokenizer.json, has 4 MB at most. Parsed, JSON takes up to 25 times its bytes.
MAX_SMALL_BYTES: Final = 6 << 20


@contextmanager
def reading(path: Path, *damaged: type[Exception]) -> Iterator[None]:
    """Raise CheckpointError, with the file's name, for OSError and `damaged`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except damaged as error:
        raise CheckpointError(f"{path} is cut short or damaged: fetch it again") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file. A pipe or device, which could be endless, raises CheckpointError."""
    with reading(path), open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path} is no regular file")
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def begins_with(path: Path, *beginnings: bytes) -> bool:
    with opened(path) as file:
        return file.read(max(map(len, beginnings))).startswith(beginnings)


def read_small(path: Path) -> bytes:
    """Read the file. Raises CheckpointError if it is unreadable or larger than any of Whisper's."""
    with opened(path) as file:
        content = file.read(MAX_SMALL_BYTES + 1)
    if len(content) > MAX_SMALL_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_SMALL_BYTES} bytes")
    return content


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_small(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what it should be (a JSON object): fetch it again")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
STORED = "stored_tensors.json"  # this server's own: where tensors lie in another program's file
CTRANSLATE2 = "model.bin"

# Of every published model's tokenizer.
ENGLISH_VOCABULARY, MULTILINGUAL_VOCABULARY, CANTONESE_VOCABULARY = 51864, 51865, 51866  # entries
PUBLISHED_VOCABULARIES: Final = (ENGLISH_VOCABULARY, MULTILINGUAL_VOCABULARY, CANTONESE_VOCABULARY)
LANGUAGE_TOKEN: Final = re.compile(r"<\|[a-z]{2,3}\|>")


# -- Folders -------------------------------------------------------------------------------------------------

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
