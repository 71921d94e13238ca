"""Who may ask: `--api-key`, and `--keys-file`, which is read again when it changes."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from asr_server.annexes.keys import KeysSettings
from asr_server.annexes.keys.accounts import Account, Key, read_keys_file
from asr_server.api.state import NOBODY, Caller
from asr_server.config import naming
from asr_server.errors import AdminRequired, InvalidApiKey

LOOK_EVERY_S: Final = 0.5  # at the file; it rests if two looks find the same
SHORT: Final = 20  # characters: shorter keys can be guessed

_Version = tuple[int, int, int, int]  # when modified, bytes, inode, mode

logger = logging.getLogger(__name__)


class ApiKeys:
    def __init__(self, settings: KeysSettings, model_names: Collection[str] = ()) -> None:
        self.accounts: tuple[Account, ...] = ()  # of the file
        self.is_stale = False  # the file is broken or gone: its last keys are taken
        self.required = bool(settings.api_key or settings.keys_file)
        self._own = (Caller(_digest(settings.api_key)),) if settings.api_key else ()
        self.callers = self._own if self.required else (NOBODY,)
        self._path, self._model_names = Path(settings.keys_file), model_names
        self._has_file = bool(settings.keys_file)
        self._seen: _Version | None = None
        self._read_last: _Version | None = None
        self._problem = ""  # of the version read last
        if self._has_file:
            for _ in range(2):  # the server starts after the file was written
                self._take(self._look())
        if 0 < len(settings.api_key) < SHORT:
            logger.warning(
                "the key of %s can be guessed: a key should have at least %d random characters",
                naming("api_key"),
                SHORT,
            )

    async def watch(self) -> None:
        """Run until cancelled, if there is a file. Reads in a thread: the disk may hang."""
        while self._has_file:
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
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode

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
        named = (Caller(digest, each) for each in self.accounts for digest in each.key.digests)
        self.callers = (*self._own, *named)
        logger.info("%d keys read from %s", len(keys), self._path)

    def check(self, authorization: str) -> Caller:
        """Raises InvalidApiKey."""
        if not self.required:
            return NOBODY
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
        if (caller := self.find(given.strip())) is None:
            raise InvalidApiKey("Incorrect API key.")
        return caller

    def check_admin(self, authorization: str) -> Caller:
        """Raises InvalidApiKey, AdminRequired."""
        caller = self.check(authorization)
        if caller.account is None or not caller.account.is_admin:
            raise AdminRequired(
                f"Models are loaded and unloaded with a key that has 'admin: true' in {naming('keys_file')}."
            )
        return caller

    def find(self, given: str) -> Caller | None:
        digest = _digest(given)
        return self._first(lambda caller: hmac.compare_digest(digest, caller.digest))

    def _first(self, matches: Callable[[Caller], bool]) -> Caller | None:
        """Compare all, so that the time does not tell which one matches."""
        return next(iter([caller for caller in self.callers if matches(caller)]), None)

    def sign(self, message: bytes, caller: Caller) -> bytes:
        """Sign for a caller, by a key that servers with the same keys share."""
        return hmac.digest(_digest("client secrets", caller.digest), message, "sha256")

    def signer_of(self, message: bytes, signature: bytes) -> Caller | None:
        """Return the caller that it was signed for; None if that key is gone."""
        return self._first(lambda caller: hmac.compare_digest(signature, self.sign(message, caller)))


def _digest(text: str, more: bytes = b"") -> bytes:
    return hashlib.sha256(text.encode() + more).digest()
