"""The random key that signs client secrets, kept beside the key file or in memory.

Unrelated to API keys, so a secret helps nobody to guess one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

SUFFIX: Final = ".signing"  # after the name of the file of API keys
NUM_BYTES: Final = 32
MAX_BYTES: Final = 4096

logger = logging.getLogger(__name__)


def signing_key(key_file: Path | None) -> bytes:
    """Return the key beside this file, shared by servers; make it if missing."""
    if key_file is None:
        return secrets.token_bytes(NUM_BYTES)
    path = key_file.with_name(key_file.name + SUFFIX)
    try:
        if not path.exists():
            _create(path)
        return _read(path)
    except (OSError, ValueError) as error:
        logger.warning(
            "client secrets hold for this process alone, and until it ends: %s cannot be used: %s",
            path,
            getattr(error, "strerror", None) or error,
        )
        return secrets.token_bytes(NUM_BYTES)


def _create(path: Path) -> None:
    descriptor, whole = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(whole, path)
    finally:
        os.unlink(whole)


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError("it belongs to another user")
        if status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ValueError("every user of this machine can read or write it: chmod o-rw")
        key = file.read(MAX_BYTES)
    if len(key) < NUM_BYTES:
        raise ValueError(f"it must have at least {NUM_BYTES} random bytes")
    return key
