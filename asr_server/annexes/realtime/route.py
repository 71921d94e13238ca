"""The routes of `/v1/realtime`: open sessions and issue client secrets. Transcribes nothing."""

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request, WebSocket
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.websockets import WebSocketState

from asr_server import metrics
from asr_server.annexes.realtime import config as session_config
from asr_server.annexes.realtime.client_events import as_invalid_value
from asr_server.annexes.realtime.config import SessionConfig
from asr_server.annexes.realtime.server_events import ClientSecret, ClientSecretRequest
from asr_server.annexes.realtime.session import RealtimeSession
from asr_server.api.errors import HANDLED, response_to
from asr_server.api.middleware import check_origin
from asr_server.api.request import read_small_body
from asr_server.api.state import AppState, caller_of, get_state, metered, models_of, require_key, set_caller
from asr_server.api.transcribe import answer_headers
from asr_server.errors import InvalidValue, ShuttingDown

KEY_PROTOCOL: Final = "openai-insecure-api-key."
PROTOCOL: Final = "realtime"
MAX_BODY_BYTES: Final = 256 * 1024
# A line of a handshake's head has 8192 bytes, with its name and `KEY_PROTOCOL`.
MAX_SECRET_LETTERS: Final = 8000

# OpenAI describes these; /openapi.json cannot describe a WebSocket.
router = APIRouter(prefix="/v1/realtime", include_in_schema=False)
logger = logging.getLogger(__name__)


@router.websocket("")
async def realtime(socket: WebSocket) -> None:
    """Open a session. Refusals of key, settings and places answer the handshake."""
    protocol = PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None
    await serve_session(
        socket, lambda _, state: RealtimeSession(socket, state, _opening_config(socket, state)), protocol
    )


async def serve_session(
    socket: WebSocket,
    make: Callable[[WebSocket, AppState], RealtimeSession],
    protocol: str | None = None,
    refusal: Callable[[Exception], Response] = response_to,
) -> None:
    state, session = get_state(socket), None
    try:
        session = make(socket, state)
        with metered(socket), state.realtime.enter(session.end, metrics.current_request_stats().key):
            session.model.begin_loading()
            await socket.accept(protocol, Headers(answer_headers(session.model)).raw)
            await session.run()
    except Exception as error:
        if session is None or socket.application_state is WebSocketState.CONNECTING:
            await _refuse(socket, error, refusal)
        else:
            logger.error("a realtime session has failed", exc_info=error)
            await session.fail(error)


@router.get("")
async def explain_refusal(request: Request) -> None:
    """Answer a plain GET as the handshake would be: pages never see that."""
    state = get_state(request)
    _opening_config(request, state)
    if account := caller_of(request).account:
        account.require_room()
    state.realtime.require_place(metrics.current_request_stats().key)
    raise HTTPException(
        HTTPStatus.UPGRADE_REQUIRED,
        "A WebSocket handshake would be taken here; a proxy in between may not pass it on.",
        {"Upgrade": "websocket", "Connection": "Upgrade"},
    )


def _opening_config(connection: HTTPConnection, state: AppState) -> SessionConfig:
    check_origin(connection, state.settings, state.api_keys.required)
    config = _authorized_config(connection, state)
    require_service(state)
    query = connection.query_params
    if query.get("intent", "transcription") != "transcription":
        raise InvalidValue("This server transcribes only: 'intent' can be 'transcription'.", "intent")
    if model := query.get("model"):
        models_of(connection).choose(model)
        config = session_config.with_model(config, model)
    return config


def require_service(state: AppState) -> None:
    """Raises ShuttingDown, EngineUnavailable."""
    if state.realtime.is_draining:
        raise ShuttingDown
    state.models.require_engine()


def _authorized_config(connection: HTTPConnection, state: AppState) -> SessionConfig:
    protocols: list[str] = connection.scope.get("subprotocols", [])
    of_protocol = (p.removeprefix(KEY_PROTOCOL) for p in protocols if p.startswith(KEY_PROTOCOL))
    header = connection.headers.get("authorization") or f"Bearer {next(of_protocol, '')}"
    key = header.partition(" ")[2].strip()
    if key.startswith(session_config.PREFIX) and state.api_keys.find(key) is None:
        caller, config = session_config.open_secret(state.api_keys, key)
        set_caller(connection, caller)
        return config
    set_caller(connection, state.api_keys.check(header))
    return session_config.default_config(models_of(connection).default.name)


async def _refuse(socket: WebSocket, error: Exception, refusal: Callable[[Exception], Response]) -> None:
    if not isinstance(error, HANDLED):
        logger.error("a realtime handshake has failed", exc_info=error)
    with contextlib.suppress(Exception):  # the client may have left
        await socket.send_denial_response(refusal(error))


@router.post("/client_secrets", dependencies=[Depends(require_key)], response_model=None)
async def create_client_secret(request: Request) -> Response:
    """Create a browser's key that opens sessions with these settings until it expires."""
    state = get_state(request)
    models, caller = models_of(request), caller_of(request)
    body = await read_small_body(request, MAX_BODY_BYTES)
    try:
        wanted = msgspec.json.decode(body or b"{}", type=ClientSecretRequest)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise as_invalid_value(error, "body") from None
    default = session_config.default_config(models.default.name)
    config = session_config.update_config(default, wanted.session, models)
    session_config.decoding_options(config, models)  # raises for a language that is not known
    expires_at = int(time.time()) + wanted.expires_after.seconds
    value = session_config.make_secret(state.api_keys, caller, config, expires_at)
    if len(value) > MAX_SECRET_LETTERS:
        raise InvalidValue(
            f"The client secret would have {len(value)} characters, and a WebSocket handshake takes "
            f"{MAX_SECRET_LETTERS}: shorten 'prompt', 'keywords' or 'languages'.",
            "session",
        )
    secret = ClientSecret(
        value, expires_at, session_config.describe(config, f"sess_{uuid.uuid4().hex}", expires_at)
    )
    return Response(msgspec.json.encode(secret), media_type="application/json")
