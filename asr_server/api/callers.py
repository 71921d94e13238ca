"""The sender of a request, and what the core asks of keys: `asr_server.keys` has them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from asr_server.metrics import Account


class Caller(NamedTuple):
    digest: bytes  # of the key, which signs client secrets
    account: Account | None = None  # of a key that has a name


NOBODY: Final = Caller(secrets.token_bytes(32))  # who asks a server without keys


class Keys(Protocol):
    @property
    def required(self) -> bool: ...
    @property
    def accounts(self) -> Sequence[Account]: ...
    @property
    def is_stale(self) -> bool: ...
    def check(self, authorization: str) -> Caller: ...
    def check_admin(self, authorization: str) -> Caller: ...
    def find(self, given: str) -> Caller | None: ...
    def sign(self, message: bytes, caller: Caller) -> bytes: ...
    def signer_of(self, message: bytes, signature: bytes) -> Caller | None: ...
