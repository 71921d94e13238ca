"""The keys of `--keys-file` in use, read again when it changes. Knows no request.

A version counts once the file rests: one that is being written may already be a shorter list.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from asr_server.api.keys import Key, read_named_keys
from asr_server.api.limits import Account

LOOK_EVERY_S: Final = 0.5  # at the file; it rests if two looks find the same

Version = tuple[int, ...]

logger = logging.getLogger(__name__)


class Caller(NamedTuple):
    """The sender of a request."""

    digest: bytes  # of the key, which signs client secrets
    account: Account | None = None  # of a key that has a name


class KeysFile:
    def __init__(self, path: Path) -> None:
        self.accounts: tuple[Account, ...] = ()
        self.callers: tuple[Caller, ...] = ()
        self.is_stale = False  # the file is broken or gone: its last keys are taken
        self._path = path
        self._seen: Version = ()
        self._read: Version = ()
        self._problem = ""  # of the version read last
        for _ in range(2):  # the server starts after the file was written
            self.refresh()

    async def watch(self) -> None:
        """Run until cancelled. Reads in a thread: the disk may hang."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._take(await asyncio.to_thread(self._look))

    def refresh(self) -> None:
        self._take(self._look())

    def _look(self) -> Sequence[Key] | None:
        """Return the keys of a new version at rest, else None."""
        keys = None
        try:
            version, before = _version_of(self._path), self._seen
            self._seen = version
            if version == before != self._read:
                keys, self._problem = self._keys_of(version)
                self._read = version
            self._report(self._problem)
        except OSError as error:
            self._report(error.strerror or str(error))
        return keys

    def _keys_of(self, version: Version) -> tuple[Sequence[Key] | None, str]:
        try:
            keys = read_named_keys(self._path)
        except ValueError as error:
            return None, str(error)
        if _version_of(self._path) != version:  # changed meanwhile: the next looks see it
            return None, self._problem
        return keys, ""

    def _report(self, problem: str) -> None:
        if problem and not self.is_stale:
            logger.error("%s cannot be used, its last keys are still taken: %s", self._path, problem)
        self.is_stale = bool(problem)

    def _take(self, keys: Sequence[Key] | None) -> None:
        if keys is None:
            return
        known = {account.name: account for account in self.accounts}
        for key in keys:
            if key.name in known:
                known[key.name].set_key(key)
            else:
                known[key.name] = Account(key)
        self.accounts = tuple(known[key.name] for key in keys)
        self.callers = tuple(
            Caller(digest, account) for account in self.accounts for digest in account.key.digests
        )
        logger.info("%d keys with names read from %s", len(keys), self._path)


def _version_of(path: Path) -> Version:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
