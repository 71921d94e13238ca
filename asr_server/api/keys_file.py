"""The keys of `--keys-file` in use, with their names and limits. Knows no request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from asr_server.api.keys import Key, read_named_keys
from asr_server.api.limits import Account
from asr_server.api.watched_file import WatchedFile

logger = logging.getLogger(__name__)


class Caller(NamedTuple):
    """The sender of a request."""

    digest: bytes  # of the key, which signs client secrets
    account: Account | None = None  # of a key that has a name


class KeysFile(WatchedFile[tuple[Key, ...]]):
    def __init__(self, path: Path) -> None:
        self.accounts: tuple[Account, ...] = ()
        self.callers: tuple[Caller, ...] = ()
        super().__init__(path, read_named_keys)

    def _take(self, content: tuple[Key, ...]) -> None:
        known = {account.name: account for account in self.accounts}
        for key in content:
            if key.name in known:
                known[key.name].set_key(key)
            else:
                known[key.name] = Account(key)
        self.accounts = tuple(known[key.name] for key in content)
        self.callers = tuple(
            Caller(digest, account) for account in self.accounts for digest in account.key.digests
        )
        logger.info("%d keys with names read from %s", len(content), self._path)
