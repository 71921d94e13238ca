"""Creates the FastAPI application: state, routes, error handlers and middleware. `server.py` serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi_offline import FastAPIOffline

from asr_server import __version__
from asr_server.api import errors, metrics, openapi, operations, pages, transcriptions
from asr_server.api.admission import AdmissionLimiter
from asr_server.api.answer_headers import IGNORED_FIELDS, MODEL_LIMIT
from asr_server.api.api_keys import ApiKeys
from asr_server.api.idle_memory import release_memory_when_idle
from asr_server.api.realtime.registry import RealtimeSessions
from asr_server.api.realtime.route import router as realtime_router
from asr_server.api.request_id import REQUEST_ID, RequestIdMiddleware
from asr_server.api.request_log import RequestLogMiddleware
from asr_server.api.state import AppState
from asr_server.api.unread_body import UnreadBodyMiddleware
from asr_server.api.upload import UploadMemory
from asr_server.audio import AudioLimits, PreprocessPool
from asr_server.checkpoint import AudioWindow
from asr_server.config import Settings
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.tokenizer import Tokenizer
from asr_server.transcription import StallLimits, Transcriber

FILE_THREADS: Final = 4
"""That read static files for Starlette. Its default of 40 would all stay after a burst."""


def create_app(
    settings: Settings,
    dispatcher: Dispatcher,
    pool: PreprocessPool,
    tokenizer: Tokenizer,
    window: AudioWindow,
) -> FastAPI:
    """The application. It starts and stops the dispatcher and the pool with itself."""
    app = FastAPIOffline(  # its page at /docs loads nothing from other hosts
        title="asr-server",
        version=__version__,
        lifespan=_lifespan,
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    app.state.server = AppState(
        settings,
        dispatcher,
        pool,
        Transcriber(dispatcher, pool, tokenizer, settings.check_voice, StallLimits.from_settings(settings)),
        AdmissionLimiter(settings.max_concurrent_requests),
        UploadMemory(settings.max_upload_memory_bytes),
        AudioLimits.from_settings(settings, window),
        RealtimeSessions(settings.max_realtime_sessions, dispatcher),
        ApiKeys(settings),
        started_at=int(time.time()),
    )
    errors.install(app)
    app.include_router(transcriptions.router)  # routes are tried in this order
    app.include_router(operations.probes)
    app.include_router(operations.models)
    app.include_router(metrics.router)
    app.include_router(realtime_router)
    pages.install(app)
    openapi.install(app, settings)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(UnreadBodyMiddleware)
    _allow_origins(app, settings)
    app.add_middleware(RequestLogMiddleware)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.server
    current_default_thread_limiter().total_tokens = FILE_THREADS
    await state.dispatcher.start()
    releasing = asyncio.create_task(release_memory_when_idle(lambda: state.is_idle))
    try:
        yield
    finally:
        releasing.cancel()
        await state.dispatcher.stop()
        await asyncio.to_thread(state.pool.shutdown)


def _allow_origins(app: FastAPI, settings: Settings) -> None:
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, MODEL_LIMIT, IGNORED_FIELDS],
        )
