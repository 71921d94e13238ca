"""API keys in a file, one a line, so that one can be replaced by another while both are taken for a while."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Final

RECHECK_S: Final = 1.0  # how soon a change is noticed

logger = logging.getLogger(__name__)


def read_keys(path: Path) -> tuple[str, ...]:
    """The lines that are neither empty nor comments (#). Raises OSError, UnicodeDecodeError."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(line for line in lines if line and not line.startswith("#"))


class KeyFile:
    """The keys of one file as they are now. While it cannot be read, those read last are still taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[str, ...] = ()
        self._version: tuple[int, ...] = ()
        self._checked_at = float("-inf")

    @property
    def keys(self) -> tuple[str, ...]:
        """Reads the file again where it has changed. It is asked about once a second at most."""
        now = time.monotonic()
        if now - self._checked_at >= RECHECK_S:
            self._checked_at = now
            self._refresh()
        return self._keys

    def _refresh(self) -> None:
        version: tuple[int, ...] = ()
        try:
            status = os.stat(self._path)
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if version != self._version:
                self._keys = read_keys(self._path)
                logger.info("%d API keys read from %s", len(self._keys), self._path)
        except (OSError, UnicodeDecodeError) as error:
            if self._version:
                logger.warning("%s cannot be read, its last keys are still taken: %s", self._path, error)
            version = ()
        self._version = version
