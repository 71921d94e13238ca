"""Requires an API key under /v1, where the server has any. A dependency of the routes."""

from __future__ import annotations

from starlette.requests import Request

from asr_server.api.state import get_state


async def require_key(request: Request) -> None:
    """Raises InvalidApiKey."""
    get_state(request).api_keys.check(request.headers.get("authorization", ""))
