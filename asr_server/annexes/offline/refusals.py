"""What a server's refusals mean, and when it is asked again."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, TypeVar

import httpx2

from asr_server import errors
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue

PATIENCE_S: Final = 900.0  # as long as a server may take to load its model
MAX_UNASKED: Final = 8  # tries in a row after which the server has not said when to come back
MAX_RETRY_AFTER_S: Final = 120.0  # a server that wants more is asked sooner
MAX_BACKOFF_S: Final = 30.0  # between tries where the server says nothing
RETRIED: Final = frozenset({408, 409, 429})  # and everything from 500 on, as OpenAI's clients do
OF_ONE_FILE: Final = frozenset({413, 415, 422})  # a proxy's own, whatever it says
PARAMS_OF_ONE_FILE: Final = frozenset({"file", "channels", "track"})

T = TypeVar("T")


class TryAgain(Exception):
    """Another try may succeed, after `wait_s` if given. `error` is raised after the last."""

    def __init__(self, error: Exception, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


async def with_retries(attempt: Callable[[], Awaitable[T]], on_wait: Callable[[Exception], None]) -> T:
    started_at, num_unasked = time.monotonic(), 0
    while True:
        try:
            return await attempt()
        except TryAgain as reason:
            num_unasked = num_unasked + 1 if reason.wait_s is None else 0
            if num_unasked == MAX_UNASKED or time.monotonic() - started_at > PATIENCE_S:
                raise reason.error from None
            on_wait(reason.error)
            await asyncio.sleep(_backoff_s(num_unasked) if reason.wait_s is None else reason.wait_s)


def _backoff_s(num_tries: int) -> float:
    return min(MAX_BACKOFF_S, 0.5 * 2.0 ** (num_tries - 1)) * random.uniform(1.0, 1.25)  # nosec B311


def refusal(status: int, detail: Mapping[str, Any], message: str, headers: Mapping[str, str]) -> Exception:
    """Return the error that an answer means: of this recording, of all, or one that may pass."""
    if (status in RETRIED or status >= 500) and headers.get("x-should-retry") != "false":
        is_of_all = status in (429, 503)
        return TryAgain(EngineUnavailable(message) if is_of_all else ChunkFailed(message), _wait_s(headers))
    if status >= 500:
        return ChunkFailed(message)
    if detail.get("code") == errors.NotFound.code or status == HTTPStatus.METHOD_NOT_ALLOWED:
        return errors.NotFound(message)
    is_of_one_file = status in OF_ONE_FILE or (status == 403 and not detail)  # a proxy that looks into files
    is_of_one_file |= detail.get("param") in PARAMS_OF_ONE_FILE
    return errors.InvalidAudio(message) if is_of_one_file else InvalidValue(message)


def refusal_by(response: httpx2.Response, body: bytes) -> Exception:
    detail: Any = None
    with suppress(ValueError, TypeError, LookupError):
        detail = json.loads(body)["error"]
    detail = detail if isinstance(detail, dict) else {}
    answer = f"{response.status_code} {response.reason_phrase}".strip()
    message = str(detail.get("message") or f"{response.url} answered {answer}, without a reason")
    return refusal(response.status_code, detail, message, response.headers)


def refusal_in_stream(detail: Mapping[str, Any]) -> Exception:
    status = _STATUSES.get(detail.get("type", ""), 500)
    headers = {} if status == 503 else {"x-should-retry": "false"}
    return refusal(status, detail, str(detail.get("message")), headers)


_STATUSES: Final = {"service_unavailable_error": 503, "invalid_request_error": 400}


def lost_connection(error: httpx2.TransportError) -> EngineUnavailable:
    return EngineUnavailable(f"cannot reach {error.request.url}: {str(error) or type(error).__name__}")


def _wait_s(headers: Mapping[str, str]) -> float | None:
    for name, per_s in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            return min(MAX_RETRY_AFTER_S, max(0.0, float(headers[name]) / per_s))
    return None
