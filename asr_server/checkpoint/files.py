"""Read a checkpoint's small files.

A checkpoint's author is not trusted: files must be regular and bounded.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

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
