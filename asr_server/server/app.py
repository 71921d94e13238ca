"""Create the FastAPI application: state, routes, error handlers and middleware."""

import asyncio
import contextlib
import ctypes
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Final

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi_offline import FastAPIOffline

from asr_server import __version__
from asr_server.annexes import compat, model_loading, page
from asr_server.annexes.alignment import routes as alignment
from asr_server.annexes.deepgram import routes as deepgram
from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.keys.api_keys import ApiKeys
from asr_server.annexes.monitoring import MonitoringSettings, activity, metrics
from asr_server.annexes.monitoring.metrics import STATM, metrics_port, resident_bytes
from asr_server.annexes.realtime import route as realtime
from asr_server.annexes.speakers.track import follow_speakers
from asr_server.api import errors, middleware, openapi, routes, transcribe
from asr_server.api.middleware import History, Tracer
from asr_server.api.models import Models
from asr_server.api.schemas import HEADERS
from asr_server.api.state import AdmissionLimiter, AppState, RealtimeSessions
from asr_server.api.upload import UploadStore
from asr_server.audio.recording import PreprocessPool
from asr_server.config import MIB, Settings
from asr_server.server.settings import ServerSettings

LOOK_EVERY_S: Final = 2.0  # at the memory
WORTH_BYTES: Final = 4 * MIB  # less growth of the memory is left alone


async def release_memory_when_idle(is_idle: Callable[[], bool]) -> None:
    """Run until cancelled; return at once without glibc or /proc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not STATM.exists():
        return
    least_bytes = resident_bytes()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if is_idle() and resident_bytes() > least_bytes + WORTH_BYTES:
            await asyncio.to_thread(trim, 0)  # some milliseconds
            least_bytes = resident_bytes()  # what stays is in use
        least_bytes = min(least_bytes, resident_bytes())


# Of anyio's default limiter, which reads static files: the 40 that it allows would all stay after a burst.
FILE_THREADS: Final = 4


def create_app(
    settings: ServerSettings, models: Models, pool: PreprocessPool, tracer: Tracer | None = None
) -> FastAPI:
    """Make the application, which starts and stops models and pool."""
    app = FastAPIOffline(  # has Swagger's files
        docs_url=None,
        title="asr-server",
        version=__version__,
        lifespan=_lifespan,
        redoc_url=None,
        redirect_slashes=False,  # the Host of a redirect may be a proxy's
        swagger_ui_parameters={"validatorUrl": None},
        exception_handlers=errors.HANDLERS,
    )
    app.state.samples = deque[activity.Sample](maxlen=activity.MAX_SAMPLES)
    keys = app.state.keys = ApiKeys(settings, models.names)
    is_shared = bool(settings.keys_file)
    app.state.server = AppState(
        settings,
        models,
        pool,
        AdmissionLimiter(settings.max_concurrent_requests, is_shared=is_shared),
        UploadStore(),
        RealtimeSessions(settings.max_realtime_sessions, is_shared),
        keys,
        History(tracer),
        follow_speakers,
        started_at=int(time.time()),
    )
    routers = [transcribe.router, alignment.router, routes.probes, model_loading.router, routes.models]
    routers += [activity.router, *([] if settings.has_metrics_port else [metrics.router])]
    routers += [realtime.router, deepgram.router, compat.azure, compat.whisper]
    for router in routers:  # routes are tried in this order
        app.include_router(router)
    _add_jobs(app, settings)
    page.install(app)
    app.router.default = middleware.refusing_unknown_websockets(app.router.default)
    make_document = partial(openapi.document_of, app, models, keys.required)
    app.openapi = cache(make_document)  # type: ignore[method-assign]
    app.add_middleware(middleware.PlainRoutes, routes=transcribe.router.routes)
    _wrap(app, settings, keys.required, app.state.server.history)
    return app


def _add_jobs(app: FastAPI, settings: JobsSettings) -> None:
    app.state.jobs = None
    if settings.jobs_dir:
        from asr_server.annexes.jobs.batches import batches, files  # bring SQLAlchemy
        from asr_server.annexes.jobs.routes import router
        from asr_server.annexes.jobs.service import Jobs

        app.state.jobs = Jobs(app.state.server)
        app.state.server.take_in_background = app.state.jobs.take
        for each in (router, files, batches):
            app.include_router(each)


def create_metrics_app(state: AppState, settings: Settings) -> FastAPI:
    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=errors.HANDLERS)
    app.state.server = state
    app.include_router(routes.probes)
    app.include_router(metrics.router)
    _wrap(app, settings, False, History())
    return app


def _wrap(app: FastAPI, settings: Settings, asks_for_key: bool, history: History) -> None:
    app.add_middleware(middleware.LastErrorMiddleware)
    if middleware.checks_hosts(settings, asks_for_key):
        app.add_middleware(middleware.LocalHosts, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[*HEADERS],
        )
    app.add_middleware(middleware.RequestLogMiddleware, history=history)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.server
    current_default_thread_limiter().total_tokens = FILE_THREADS
    helpers = [
        asyncio.create_task(release_memory_when_idle(lambda: state.is_idle)),
        asyncio.create_task(app.state.keys.watch(), name="watch the keys"),
    ]
    try:
        await state.models.start()
        if any(model.settings.idle_unload_s for model in state.models):
            helpers.append(
                asyncio.create_task(model_loading.unload_idle_models(state.models), name="unload idle models")
            )
        jobs = app.state.jobs.running() if app.state.jobs else contextlib.nullcontext()
        create_port_app = partial(create_metrics_app, state)
        async with metrics_port(state.settings.part(MonitoringSettings), create_port_app), jobs:
            helpers.append(asyncio.create_task(activity.keep_sampling(state, app.state.samples)))
            if state.settings.reuse_port:  # it listens after this: connections go to others until then
                await state.models.until_ready()
            yield
    finally:
        for helper in helpers:
            helper.cancel()
        await state.models.stop()
        await asyncio.to_thread(state.pool.shutdown)
