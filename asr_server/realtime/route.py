"""The routes of `/v1/realtime`: open sessions, and give out client secrets.

Mounted by `api/app.py`. Runs in the API process, on its event loop; never blocks it, and transcribes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from typing import Final

import msgspec
from fastapi import APIRouter, Depends, Request, WebSocket
from starlette.responses import Response

from asr_server.api.errors import body_of
from asr_server.api.middleware import answer_headers
from asr_server.api.openapi import CLIENT_SECRET_BODY, client_secret_responses
from asr_server.api.request import check_model
from asr_server.api.state import SERVICE_RESTART, AppState, get_state, require_key
from asr_server.errors import EngineUnavailable, InvalidValue, Overloaded, RequestError, ShuttingDown
from asr_server.realtime.client_events import as_invalid_value
from asr_server.realtime.config import (
    PREFIX,
    SessionConfig,
    decoding_options,
    describe,
    make_secret,
    open_secret,
    update_config,
)
from asr_server.realtime.server_events import (
    ClientSecret,
    ClientSecretRequest,
    SessionTranscription,
    error_event,
)
from asr_server.realtime.session import INTERNAL_ERROR, RealtimeSession

KEY_PROTOCOL: Final = "openai-insecure-api-key."
PROTOCOL: Final = "realtime"
POLICY_VIOLATION: Final = 1008
TRY_AGAIN_LATER: Final = 1013
MAX_BODY_BYTES: Final = 256 * 1024

router = APIRouter(prefix="/v1/realtime", tags=["realtime"])
logger = logging.getLogger(__name__)


@router.websocket("")
async def realtime(socket: WebSocket) -> None:
    """A session. A refusal is an error event and a close code: browsers see no HTTP status."""
    state = get_state(socket)
    headers = [(name.encode(), value.encode()) for name, value in answer_headers(state.settings).items()]
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None, headers)
    try:
        session = RealtimeSession(socket, state, _opening_config(socket, state))
        with state.realtime.enter(session):
            await session.run()
    except Exception as error:
        await _refuse(socket, error)


def _opening_config(socket: WebSocket, state: AppState) -> SessionConfig:
    """Returns the settings a session opens with. Raises RequestError, EngineUnavailable."""
    config = _authorized_config(socket, state)
    if state.realtime.is_draining:
        raise ShuttingDown
    state.require_engine()
    if socket.query_params.get("intent", "transcription") != "transcription":
        raise InvalidValue("This server transcribes only: 'intent' can be 'transcription'.", "intent")
    if model := socket.query_params.get("model"):
        check_model(model, state.settings)
        transcription = msgspec.structs.replace(config.transcription, model=model)
        config = msgspec.structs.replace(config, transcription=transcription)
    return config


def _authorized_config(socket: WebSocket, state: AppState) -> SessionConfig:
    """Returns the settings that a client secret carries; the defaults for any other valid key.

    Raises InvalidApiKey.
    """
    protocols: list[str] = socket.scope["subprotocols"]
    of_protocol = (p.removeprefix(KEY_PROTOCOL) for p in protocols if p.startswith(KEY_PROTOCOL))
    header = socket.headers.get("authorization") or f"Bearer {next(of_protocol, '')}"
    key = header.partition(" ")[2].strip()
    if key.startswith(PREFIX):
        return open_secret(state.api_keys.current, key)
    state.api_keys.check(header)
    return SessionConfig(SessionTranscription(state.settings.model_names[0]))


async def _refuse(socket: WebSocket, error: Exception) -> None:
    match error:
        case EngineUnavailable() if get_state(socket).realtime.is_draining:
            code = SERVICE_RESTART
        case Overloaded() | EngineUnavailable():
            code = TRY_AGAIN_LATER
        case RequestError():
            code = POLICY_VIOLATION
        case _:
            logger.exception("a realtime session has failed")
            code = INTERNAL_ERROR
    event = msgspec.structs.replace(error_event(body_of(error).error), event_id=f"event_{uuid.uuid4().hex}")
    with contextlib.suppress(Exception):  # the client may have left
        await socket.send_text(msgspec.json.encode(event).decode())
        await socket.close(code, getattr(error, "message", "The server had an error.")[:120])


@router.post(
    "/client_secrets",
    dependencies=[Depends(require_key)],
    response_model=None,
    openapi_extra=CLIENT_SECRET_BODY,
    responses=client_secret_responses(),
)
async def create_client_secret(request: Request) -> Response:
    """A key for one browser, which opens sessions with these settings until it expires."""
    state = get_state(request)
    wanted = await _secret_request(request)
    default = SessionConfig(SessionTranscription(state.settings.model_names[0]))
    config = update_config(default, wanted.session, state.settings)
    # Raises for a language that is not known.
    decoding_options(config, state.transcriber, state.settings.temperatures)
    expires_at = int(time.time()) + wanted.expires_after.seconds
    secret = ClientSecret(
        make_secret(state.api_keys.current, config, expires_at),
        expires_at,
        describe(config, f"sess_{uuid.uuid4().hex}", expires_at),
    )
    return Response(msgspec.json.encode(secret), media_type="application/json")


async def _secret_request(request: Request) -> ClientSecretRequest:
    """Raises InvalidValue."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InvalidValue(f"The body is over the limit of {MAX_BODY_BYTES} bytes.")
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=ClientSecretRequest)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise as_invalid_value(error, "body") from None
