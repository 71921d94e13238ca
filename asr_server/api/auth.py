"""The key that everything under /v1 requires, when there is one."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from asr_server.api.state import get_state
from asr_server.errors import InvalidApiKey


async def require_key(request: Request) -> None:
    """Raises InvalidApiKey."""
    check_key(request.headers.get("authorization", ""), get_state(request).settings.api_key)


def check_key(header: str, expected: str) -> None:
    """Raises InvalidApiKey. Compares in constant time."""
    if not expected:
        return
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
    if not hmac.compare_digest(given.strip().encode(), expected.encode()):
        raise InvalidApiKey("Incorrect API key.")
