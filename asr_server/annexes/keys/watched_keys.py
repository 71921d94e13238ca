"""The keys of `--keys-file` in use, read again when the file changes. Knows no request.

A version counts once the file rests: one that is being written may already be a shorter list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from asr_server.annexes.keys.accounts import Account
from asr_server.annexes.keys.keys_file import Key, read_keys_file
from asr_server.api.state import Caller

LOOK_EVERY_S: Final = 0.5  # at the file; it rests if two looks find the same

logger = logging.getLogger(__name__)


class _Version(NamedTuple):
    modified_ns: int
    num_bytes: int
    inode: int
    mode: int


class WatchedKeys:
    def __init__(self, path: Path, model_names: Collection[str]) -> None:
        self.accounts: tuple[Account, ...] = ()
        self.callers: tuple[Caller, ...] = ()
        self.is_stale = False  # the file is broken or gone: its last keys are taken
        self._path, self._model_names = path, model_names
        self._seen: _Version | None = None
        self._read_last: _Version | None = None
        self._problem = ""  # of the version read last
        for _ in range(2):  # the server starts after the file was written
            self._take(self._look())

    async def watch(self) -> None:
        """Run until cancelled. Reads in a thread: the disk may hang."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._take(await asyncio.to_thread(self._look))

    def _look(self) -> tuple[Key, ...] | None:
        """Return the keys of a new version at rest, else None."""
        keys = None
        try:
            before, self._seen = self._seen, self._version()
            if self._seen == before != self._read_last:
                keys, self._problem = self._keys_of(self._seen)
                self._read_last = self._seen
            self._report(self._problem)
        except OSError as error:
            self._report(error.strerror or str(error))
        return keys

    def _version(self) -> _Version:
        status = self._path.stat()
        return _Version(status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)

    def _keys_of(self, version: _Version) -> tuple[tuple[Key, ...] | None, str]:
        try:
            keys = read_keys_file(self._path)
        except ValueError as error:
            return None, str(error)
        is_whole = self._version() == version  # else it changed meanwhile: the next looks see it
        return (keys, "") if is_whole else (None, self._problem)

    def _report(self, problem: str) -> None:
        if problem and not self.is_stale:
            logger.error("%s cannot be used, its last keys are still taken: %s", self._path, problem)
        self.is_stale = bool(problem)

    def _take(self, keys: tuple[Key, ...] | None) -> None:
        """Use these keys; a name that stays keeps its account."""
        if keys is None:
            return
        known = {account.name: account for account in self.accounts}
        self.accounts = tuple(known.get(key.name) or Account(key) for key in keys)
        for account, key in zip(self.accounts, keys, strict=True):
            account.set_key(key)
            for name in sorted(set(key.models or ()).difference(self._model_names)):
                logger.warning("key '%s' names the model '%s', which is not served", key.name, name)
        self.callers = tuple(Caller(digest, each) for each in self.accounts for digest in each.key.digests)
        logger.info("%d keys read from %s", len(keys), self._path)
