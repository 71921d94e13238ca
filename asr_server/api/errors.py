"""Map every exception to a status and OpenAI's error body. No other module does."""

import difflib
import logging
import math
import random
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from asr_server import errors, metrics
from asr_server.api.schemas import RETRY_AFTER, RETRY_AFTER_MS, SHOULD_RETRY, ErrorBody, ErrorDetail
from asr_server.errors import InvalidValue, ReportedError, RequestError

MIN_WAIT_S: Final = 1.0
MAX_WAIT_S: Final = 48.0
SPREAD: Final = 1.25  # at most; official clients obey no more than 60 s
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's number, for the log: nobody reads the reply

logger = logging.getLogger(__name__)


HANDLED: Final = (ReportedError, RequestValidationError, HTTPException, ClientDisconnect)  # others are bugs


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        error = HTTPException(error.status_code, unknown_path(request.url.path))
    return response_to(error)


HANDLERS: Final[dict[int | type[Exception], Any]] = dict.fromkeys(HANDLED, _handle)  # for FastAPI


def response_to(error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    status, body = _described(error)
    return JSONResponse(body.model_dump(), status, _headers(error))


def body_of(error: Exception) -> ErrorBody:
    return _described(error)[1]


def _described(error: Exception) -> tuple[int, ErrorBody]:
    """Return status and body, and note the code for the request's log line."""
    match error:
        case ReportedError():
            metrics.current_request_stats().error_code = error.code
            return error.status, _body(error.message, error.type, error.param, error.code)
        case RequestValidationError():
            first = error.errors()[0]
            message, param = f"Invalid request: {first['msg']}.", str(first["loc"][-1])
            return RequestError.status, _body(message, RequestError.type, param, InvalidValue.code)
        case HTTPException():
            is_server_error = error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
            kind = ReportedError if is_server_error else RequestError
            return error.status_code, _body(str(error.detail), kind.type)
    message = "The server had an error while processing the request."
    return ReportedError.status, _body(message, ReportedError.type)


def _body(message: str, type: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=type, param=param, code=code))


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case errors.ShuttingDown():
            # The connection ends too: a client that keeps it would come back to this server.
            return _retry_after(error.retry_after_s) | {"Connection": "close"}
        case errors.Overloaded() | errors.ServiceUnavailable():
            return _retry_after(error.retry_after_s)
        case errors.ReplicasEnded():
            return {SHOULD_RETRY: "false"}  # official clients heed it: a retry would end more replicas
        case errors.InvalidApiKey():
            return {"WWW-Authenticate": "Bearer"}
        case HTTPException():
            return dict(error.headers or {})
    return {}


def _retry_after(wait_s: float) -> dict[str, str]:
    """Spread the wait, so that clients do not return together; OpenAI's prefer milliseconds."""
    spread_s = min(MAX_WAIT_S, max(MIN_WAIT_S, wait_s)) * random.uniform(1.0, SPREAD)  # nosec B311
    return {RETRY_AFTER: str(math.ceil(spread_s)), RETRY_AFTER_MS: str(round(1000 * spread_s))}


# -- What a client meant that sends a field or a path of another API -----------------------------------------

MAX_QUOTED: Final = 80  # characters of what the client sent that an error repeats

_TRANSLATION: Final = "translations have a route of their own, /v1/audio/translations"
_WORD_TIMES: Final = "send response_format=verbose_json and timestamp_granularities[]=word"
_SEARCH: Final = "the server chooses the search"
_RECORDING: Final = "send the recording itself in 'file'"
FOREIGN_FIELDS: Final = {
    "task": _TRANSLATION,
    "translate": _TRANSLATION,
    "word_timestamps": _WORD_TIMES,
    "beam_size": _SEARCH,
    "best_of": _SEARCH,
    "url": _RECORDING,
    "audio_url": _RECORDING,
    "initial_prompt": "it is 'prompt' here",
    "output_format": "it is 'response_format' here",
    "speaker_labels": "it is 'diarize' here",
}


def unknown_field(name: str, known: Collection[str]) -> str:
    message = f"Unknown field '{name[:MAX_QUOTED]}'"
    if hint := FOREIGN_FIELDS.get(name):
        return f"{message}: {hint}."
    if nearest := difflib.get_close_matches(name[:MAX_QUOTED], known, n=1):
        return f"{message}. Did you mean '{nearest[0]}'?"
    return f"{message}. /docs lists the fields."


_ROUTES: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/models", "/v1/realtime")


def unknown_path(path: str) -> str:
    for route in _ROUTES:
        if route.removeprefix("/v1") in path:
            return (
                f"There is no {path[:MAX_QUOTED]} here: it is {route}. A client's base URL ends in /v1, "
                "with nothing behind it."
            )
    return (
        f"There is no {path[:MAX_QUOTED]} here. This server turns speech into text and has no other route of "
        "OpenAI's; /docs lists its own."
    )
