"""A file of keys in use, read again when it changes. Knows no request.

A version counts once the file rests: one that is being written may already be a shorter list.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

LOOK_EVERY_S: Final = 0.5  # at the file; it rests if two looks find the same

Content = TypeVar("Content")

logger = logging.getLogger(__name__)


class Version(NamedTuple):
    modified_ns: int
    num_bytes: int
    inode: int
    mode: int

    @classmethod
    def of(cls, path: Path) -> Version:
        status = path.stat()
        return cls(status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)


class WatchedFile(ABC, Generic[Content]):
    def __init__(self, path: Path, read: Callable[[Path], Content]) -> None:
        """Args:
        read: raises OSError, ValueError.
        """
        self.is_stale = False  # the file is broken or gone: its last keys are taken
        self._path, self._read = path, read
        self._seen: Version | None = None
        self._read_last: Version | None = None
        self._problem = ""  # of the version read last
        for _ in range(2):  # the server starts after the file was written
            self.refresh()

    async def watch(self) -> None:
        """Run until cancelled. Reads in a thread: the disk may hang."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._take_new(await asyncio.to_thread(self._look))

    def refresh(self) -> None:
        self._take_new(self._look())

    def _take_new(self, content: Content | None) -> None:
        if content is not None:
            self._take(content)

    @abstractmethod
    def _take(self, content: Content) -> None: ...

    def _look(self) -> Content | None:
        """Return the content of a new version at rest, else None."""
        content = None
        try:
            version, before = Version.of(self._path), self._seen
            self._seen = version
            if version == before != self._read_last:
                content, self._problem = self._content_of(version)
                self._read_last = version
            self._report(self._problem)
        except OSError as error:
            self._report(error.strerror or str(error))
        return content

    def _content_of(self, version: Version) -> tuple[Content | None, str]:
        try:
            content = self._read(self._path)
        except ValueError as error:
            return None, str(error)
        if Version.of(self._path) != version:  # changed meanwhile: the next looks see it
            return None, self._problem
        return content, ""

    def _report(self, problem: str) -> None:
        if problem and not self.is_stale:
            logger.error("%s cannot be used, its last keys are still taken: %s", self._path, problem)
        self.is_stale = bool(problem)
