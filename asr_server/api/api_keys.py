"""The keys of this server: the one of `--api-key` and those of `--api-key-file`."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from asr_server.config import Settings
from asr_server.errors import InvalidApiKey
from asr_server.key_file import KeyFile


class ApiKeys:
    def __init__(self, settings: Settings) -> None:
        self._key = settings.api_key
        self._file = KeyFile(Path(settings.api_key_file)) if settings.api_key_file else None

    @property
    def required(self) -> bool:
        """Also with a file that has no keys (any more): then nobody is let in."""
        return bool(self._key or self._file)

    @property
    def current(self) -> tuple[str, ...]:
        """Those taken now, the one to sign with first; none where none is required."""
        return (*([self._key] if self._key else []), *(self._file.keys if self._file else ()))

    def check(self, authorization: str) -> None:
        """Takes the header's value. Raises InvalidApiKey."""
        if not self.required:
            return
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
        # All are compared, in constant time, so that the time tells nothing about any of them.
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, _digest(key)) for key in self.current]
        if not any(matches):
            raise InvalidApiKey("Incorrect API key.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
