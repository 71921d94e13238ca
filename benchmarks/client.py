"""One request to a server, streamed: what was heard, and when."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx


class Answer(NamedTuple):
    text: str
    num_tokens: int
    first_text_s: float  # from the request's start
    total_s: float


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        yield client


async def transcribe(
    client: httpx.AsyncClient, name: str, data: bytes, fields: Mapping[str, str] | None = None
) -> Answer:
    """Raises httpx.HTTPStatusError for any answer but 200, RuntimeError for an error within the stream."""
    form = {"model": "whisper-1", "stream": "true", **(fields or {})}
    started, first_text_s = time.perf_counter(), 0.0
    request = client.stream("POST", "/v1/audio/transcriptions", files={"file": (name, data)}, data=form)
    async with request as reply:
        reply.raise_for_status()
        async for event in _events(reply):
            elapsed_s = time.perf_counter() - started
            first_text_s = first_text_s or elapsed_s
            if event["type"] == "transcript.text.done":
                return Answer(event["text"], event["usage"]["output_tokens"], first_text_s, elapsed_s)
            if "delta" not in event:
                raise RuntimeError(f"{name}: {event}")
    raise RuntimeError(f"{name}: the stream ended early")


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
