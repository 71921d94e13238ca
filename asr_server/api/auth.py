"""Who may ask: `--api-key`, `--api-key-file`, `--keys-file` and `--admin-key`.

The file of keys without names has one a line, so that a key can be replaced while the old one works. Knows
no request.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asr_server.api.keys import require_trusted
from asr_server.api.keys_file import Caller, KeysFile
from asr_server.api.limits import Account
from asr_server.api.signing_key import signing_key
from asr_server.api.watched_file import WatchedFile
from asr_server.config import API_KEY, Settings, flag_name, naming
from asr_server.errors import AdminOff, InvalidApiKey

SHORT: Final = 20  # characters: shorter keys can be guessed

logger = logging.getLogger(__name__)


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the lines that are neither empty nor comments (#).

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, has a line that cannot be a key, or everybody can write it.
    """
    require_trusted(path)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError("the file must be UTF-8 text") from error
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for number, key in keys.items():
        if not re.fullmatch(API_KEY, key):
            raise ValueError(f"the key in line {number} must be printable ASCII without spaces")
    return tuple(keys.values())


class KeyFile(WatchedFile[tuple[str, ...]]):
    def __init__(self, path: Path) -> None:
        self.keys: tuple[str, ...] = ()
        super().__init__(path, read_keys)

    def _take(self, content: tuple[str, ...]) -> None:
        self.keys = content
        logger.info("%d API keys read from %s", len(content), self._path)
        if self._read_last and self._read_last.mode & stat.S_IROTH:
            logger.warning("every user of this machine can read the keys in %s: chmod o-r", self._path)
        if num_short := sum(len(key) < SHORT for key in content):
            logger.warning("%d keys in %s can be guessed: %s", num_short, self._path, _TOO_SHORT)


_TOO_SHORT: Final = f"a key should have at least {SHORT} random characters"


class ApiKeys:
    def __init__(self, settings: Settings) -> None:
        self._key, self._admin_key = settings.api_key, settings.admin_key
        path = Path(settings.api_key_file) if settings.api_key_file else None
        named_path = Path(settings.keys_file) if settings.keys_file else None
        self._file = KeyFile(path) if path else None
        self.named = KeysFile(named_path) if named_path else None
        self._signing_key = signing_key(path or named_path)
        for setting in ("api_key", "admin_key"):
            if 0 < len(getattr(settings, setting)) < SHORT:
                logger.warning("the key of %s can be guessed: %s", flag_name(setting), _TOO_SHORT)

    @property
    def files(self) -> list[KeyFile | KeysFile]:
        return [file for file in (self._file, self.named) if file]

    @property
    def required(self) -> bool:
        return bool(self._key or self._file or self.named)

    @property
    def current(self) -> tuple[str, ...]:
        """Return the keys without names."""
        return (*([self._key] if self._key else []), *(self._file.keys if self._file else ()))

    @property
    def accounts(self) -> tuple[Account, ...]:
        return self.named.accounts if self.named else ()

    @property
    def _callers(self) -> tuple[Caller, ...]:
        if not self.required:
            return (NOBODY,)
        named = self.named.callers if self.named else ()
        return (*named, *(Caller(_digest(key)) for key in self.current))

    def check(self, authorization: str) -> Caller:
        """Raises InvalidApiKey."""
        if not self.required:
            return NOBODY
        given = _bearer(authorization)
        if not given:
            raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
        if (caller := self.find(given)) is None:
            raise InvalidApiKey("Incorrect API key.")
        return caller

    def check_admin(self, authorization: str) -> Caller:
        """Raises AdminOff, InvalidApiKey."""
        if not self._admin_key and not any(account.key.admin for account in self.accounts):
            raise AdminOff(
                f"This server loads and unloads no models on request: set {naming('admin_key')}, or 'admin' "
                f"in {naming('keys_file')}."
            )
        given = _bearer(authorization)
        if self._admin_key and hmac.compare_digest(_digest(given), _digest(self._admin_key)):
            return NOBODY
        caller = self.find(given) if given else None
        if caller is None or caller.account is None or not caller.account.key.admin:
            raise InvalidApiKey(f"This needs the key of {naming('admin_key')}, or one with 'admin'.")
        return caller

    def find(self, given: str) -> Caller | None:
        digest = _digest(given)
        return self._first(lambda caller: hmac.compare_digest(digest, caller.digest))

    def _first(self, matches: Callable[[Caller], bool]) -> Caller | None:
        """Compare all, so that the time does not tell which one matches."""
        return next(iter([caller for caller in self._callers if matches(caller)]), None)

    def sign(self, message: bytes, caller: Caller) -> bytes:
        return self._signature(caller, hashlib.sha256(message).digest())

    def signer_of(self, message: bytes, signature: bytes) -> Caller | None:
        """Return who signed it, here or at a server with the same key file; None if that key is gone."""
        digest = hashlib.sha256(message).digest()
        return self._first(lambda caller: hmac.compare_digest(signature, self._signature(caller, digest)))

    def _signature(self, caller: Caller, message_digest: bytes) -> bytes:
        return hmac.digest(self._signing_key, caller.digest + message_digest, "sha256")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _bearer(authorization: str) -> str:
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


NOBODY: Final = Caller(_digest(""))
