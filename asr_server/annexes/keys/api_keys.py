"""Who may ask: `--api-key` and `--keys-file`. Knows no request."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from asr_server.annexes.keys.accounts import Account
from asr_server.annexes.keys.watched_keys import WatchedKeys
from asr_server.api.state import NOBODY, Caller
from asr_server.config import Settings, naming
from asr_server.errors import AdminRequired, InvalidApiKey

SHORT: Final = 20  # characters: shorter keys can be guessed

logger = logging.getLogger(__name__)


class ApiKeys:
    def __init__(self, settings: Settings, model_names: Collection[str] = ()) -> None:
        self.file = WatchedKeys(Path(settings.keys_file), model_names) if settings.keys_file else None
        self._callers = (Caller(_digest(settings.api_key)),) if settings.api_key else ()
        if 0 < len(settings.api_key) < SHORT:
            logger.warning(
                "the key of %s can be guessed: a key should have at least %d random characters",
                naming("api_key"),
                SHORT,
            )

    @property
    def required(self) -> bool:
        return bool(self._callers or self.file)

    @property
    def accounts(self) -> tuple[Account, ...]:
        return self.file.accounts if self.file else ()

    @property
    def is_stale(self) -> bool:
        return self.file is not None and self.file.is_stale

    @property
    def callers(self) -> tuple[Caller, ...]:
        return (*self._callers, *self.file.callers) if self.file else self._callers or (NOBODY,)

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
