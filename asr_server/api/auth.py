"""The key that everything under /v1 requires, when there is one."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from asr_server.api.state import get_state
from asr_server.errors import InvalidApiKey


async def require_key(request: Request) -> None:
    """Raises InvalidApiKey. Compares in constant time."""
    expected = get_state(request).settings.api_key
    if not expected:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
    if not hmac.compare_digest(given.strip().encode(), expected.encode()):
        raise InvalidApiKey("Incorrect API key.")
