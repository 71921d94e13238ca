"""Reads from a server's answer what went wrong, and whether and when to try again, for `transcriber.py`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import httpx2

from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidAudio, InvalidValue, RequestError

PATIENCE_S: Final = 900.0  # as long as a server may take to load its model
MAX_UNASKED: Final = 8  # tries in a row after which the server has not said when to come back
MAX_RETRY_AFTER_S: Final = 120.0  # a server that wants more is asked sooner
MAX_BACKOFF_S: Final = 30.0  # between tries where the server says nothing
RETRIED: Final = frozenset({408, 409, 429})  # and everything from 500 on, as OpenAI's clients do
FOR_ALL: Final = frozenset({401, 403, 404})  # the key, the address and the model are those of every file
PARAMS_OF_ONE_FILE: Final = frozenset({"file", "channels"})

T = TypeVar("T")


class TryAgain(Exception):
    """Worth another try, after `wait_s` where the server said so. `error` is what it is in the end."""

    def __init__(self, error: Exception, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


async def with_retries(attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of the first attempt that does not ask for another. Raises what the last one had."""
    started_at, num_unasked = time.monotonic(), 0
    while True:
        try:
            return await attempt()
        except TryAgain as reason:
            num_unasked = num_unasked + 1 if reason.wait_s is None else 0
            is_over = num_unasked == MAX_UNASKED or time.monotonic() - started_at > PATIENCE_S
            if is_over:
                raise reason.error from None
            await asyncio.sleep(_backoff_s(num_unasked) if reason.wait_s is None else reason.wait_s)


def _backoff_s(num_tries: int) -> float:
    """Spread, so that many recordings do not come back together."""
    return min(MAX_BACKOFF_S, 0.5 * 2.0 ** (num_tries - 1)) * random.uniform(1.0, 1.25)


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """The exception for an answer that is not 200."""
    detail = _detail_of(body)
    message = str(detail.get("message") or f"the server answered {status} without saying why")
    if (status in RETRIED or status >= 500) and headers.get("x-should-retry") != "false":
        is_of_all = status in (429, 503)
        return TryAgain(EngineUnavailable(message) if is_of_all else ChunkFailed(message), _wait_s(headers))
    if status in FOR_ALL:
        return InvalidValue(message)
    return _refusal_of_a_request(detail, message) if status < 500 else ChunkFailed(message)


def refusal_in_stream(detail: Mapping[str, Any]) -> Exception:
    """The exception for an error after the answer has begun."""
    message = str(detail.get("message"))
    match detail.get("type"):
        case "service_unavailable_error":
            return TryAgain(EngineUnavailable(message))
        case "invalid_request_error":
            return _refusal_of_a_request(detail, message)
    return ChunkFailed(message)


def lost_connection(error: httpx2.TransportError) -> EngineUnavailable:
    return EngineUnavailable(f"cannot reach {error.request.url}: {error or type(error).__name__}")


def _refusal_of_a_request(detail: Mapping[str, Any], message: str) -> RequestError:
    """What is wrong with a field is wrong for every file; what is wrong with the file is not."""
    return InvalidAudio(message) if detail.get("param") in PARAMS_OF_ONE_FILE else InvalidValue(message)


def _detail_of(body: bytes) -> dict[str, Any]:
    """Empty where the body is not an error in OpenAI's form: a proxy's, say."""
    try:
        detail = json.loads(body)["error"]
    except (ValueError, TypeError, LookupError):
        return {}
    return detail if isinstance(detail, dict) else {}


def _wait_s(headers: Mapping[str, str]) -> float | None:
    """What the server asks for, in milliseconds where it says that too; None: nothing that can be read."""
    for name, per_s in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return min(MAX_RETRY_AFTER_S, max(0.0, float(headers[name]) / per_s))
        except (KeyError, ValueError):
            continue
    return None
