"""Ephemeral keys for browsers: `POST /v1/realtime/client_secrets` gives one, a session opens with it.

A secret carries its session's settings and its end, signed with a key that follows from the first of the
server's API keys: no table of them to bound or to lose, and any process that has this API key takes it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from asr_server.api.realtime.config import SessionConfig
from asr_server.errors import InvalidApiKey

PREFIX: Final = "ek_"
_SIGNATURE_BYTES: Final = 32
_PROCESS_KEY: Final = secrets.token_bytes(32)  # where the server asks for no key


class _Grant(msgspec.Struct, frozen=True):
    expires_at: int  # Unix seconds
    config: SessionConfig
    nonce: bytes


def make_secret(api_keys: Sequence[str], config: SessionConfig, expires_at: int) -> str:
    grant = msgspec.json.encode(_Grant(expires_at, config, secrets.token_bytes(12)))
    return PREFIX + base64.urlsafe_b64encode(_sign(next(iter(api_keys), ""), grant) + grant).decode().rstrip(
        "="
    )


def open_secret(api_keys: Sequence[str], secret: str) -> SessionConfig:
    """Raises InvalidApiKey for one that was not made here or has expired."""
    try:
        raw = base64.urlsafe_b64decode(secret.removeprefix(PREFIX) + "==")
    except ValueError:
        raise InvalidApiKey("Incorrect client secret.") from None
    signature, encoded = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
    if not any(hmac.compare_digest(signature, _sign(key, encoded)) for key in api_keys or [""]):
        raise InvalidApiKey("Incorrect client secret.")
    grant = msgspec.json.decode(encoded, type=_Grant)
    if grant.expires_at < time.time():
        raise InvalidApiKey("The client secret has expired.")
    return grant.config


def _sign(api_key: str, grant: bytes) -> bytes:
    key = hashlib.sha256(b"realtime client secret\0" + api_key.encode()).digest() if api_key else _PROCESS_KEY
    return hmac.digest(key, grant, "sha256")
