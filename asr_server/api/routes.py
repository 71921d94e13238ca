"""The routes of HTTP: transcriptions and translations, probes, version, load, models, metrics, and the page.

The page at `/` is static files of this package, nothing from other hosts. `/metrics` joins gauges read from
the server's state to the counters of `asr_server/metrics.py`. Installed by `app.py`. Runs in the API process,
on its event loop; never blocks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi import Path as PathParameter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from asr_server import __version__
from asr_server import metrics as counted
from asr_server.api.openapi import (
    ENGINE_ERRORS,
    KEY_ERRORS,
    MODEL_ERRORS,
    error_responses,
    form_of,
    metrics_responses,
    transcription_responses,
    translation_responses,
)
from asr_server.api.request import check_model, parse_transcription_request, parse_translation_request
from asr_server.api.schemas import (
    Load,
    Model,
    ModelList,
    ReplicaLoad,
    Status,
    TranscriptionFields,
    TranslationFields,
    Version,
)
from asr_server.api.state import AppState, get_state, require_key
from asr_server.api.transcribe import TranscriptionResponse
from asr_server.channel.messages import STEP_TIME_BOUNDS_S, StepTimes
from asr_server.checkpoint.find import revision_of
from asr_server.dispatch.supervisor import ReplicaState

audio = APIRouter(prefix="/v1/audio", dependencies=[Depends(require_key)], tags=["audio"])


@audio.post(
    "/transcriptions",
    openapi_extra=form_of(TranscriptionFields),
    responses=transcription_responses(),
    response_model=None,
)
async def transcribe(request: Request) -> Response:
    """A recording as text, in its own language."""
    return TranscriptionResponse(get_state(request), parse_transcription_request)


@audio.post(
    "/translations",
    openapi_extra=form_of(TranslationFields),
    responses=translation_responses(),
    response_model=None,
)
async def translate(request: Request) -> Response:
    """A recording as English text."""
    return TranscriptionResponse(get_state(request), parse_translation_request)


probes = APIRouter(tags=["operations"])
models = APIRouter(prefix="/v1/models", dependencies=[Depends(require_key)], tags=["models"])


@probes.head("/health", include_in_schema=False)  # load balancers often probe with HEAD
@probes.get("/health", response_model=Status, responses=error_responses(*ENGINE_ERRORS))
@probes.head("/ping", include_in_schema=False)
@probes.get("/ping", response_model=Status, responses=error_responses(*ENGINE_ERRORS))
async def health(request: Request) -> Response:
    """Live: the event loop turns. 503 only once every replica has been given up for good."""
    get_state(request).check_health()
    return JSONResponse({"status": "ok"})


@probes.head("/ready", include_in_schema=False)
@probes.get("/ready", response_model=Status, responses=error_responses(*ENGINE_ERRORS))
async def ready(request: Request) -> Response:
    """An engine can take work. 503 while loading or once given up."""
    get_state(request).require_engine()
    return JSONResponse({"status": "ready"})


@probes.head("/version", include_in_schema=False)
@probes.get("/version", responses=error_responses())
async def version() -> Version:
    """Of the server."""
    return Version(version=__version__)


@probes.head("/load", include_in_schema=False)
@probes.get("/load", responses=error_responses())
async def load(request: Request) -> Load:
    """Requests in flight, how many were rejected so far, and what each replica is doing."""
    state = get_state(request)
    return Load(
        server_load=state.admission.num_in_flight,
        chunks=state.dispatcher.num_chunks,
        rejected=state.admission.num_rejected,
        replicas=[_replica(replica_state) for replica_state in state.dispatcher.supervisor.replica_states],
    )


def _replica(replica_state: ReplicaState) -> ReplicaLoad:
    """Describes a replica as of its last heartbeat, at most a second or so ago."""
    heartbeat = replica_state.heartbeat
    return ReplicaLoad(
        name=replica_state.replica.name,
        ready=replica_state.ready,
        chunks_in_flight=len(replica_state.in_flight),
        num_steps=heartbeat.num_steps,
        slots_in_use=heartbeat.slots_in_use,
        num_decode_steps=heartbeat.num_decode_steps,
        num_decoded_tokens=heartbeat.num_decoded_tokens,
    )


@models.get("", responses=error_responses(*KEY_ERRORS))
async def list_models(request: Request) -> ModelList:
    """The model under each of its names."""
    state = get_state(request)
    return ModelList(data=[_model(name, state) for name in state.settings.model_names])


@models.get("/{name:path}", responses=error_responses(*KEY_ERRORS, *MODEL_ERRORS))
async def get_model(
    name: Annotated[str, PathParameter(description="One of its names.")], request: Request
) -> Model:
    """The model under one of its names."""
    state = get_state(request)
    check_model(name, state.settings)
    return _model(name, state)


def _model(name: str, state: AppState) -> Model:
    settings, transcriber = state.settings, state.transcriber
    own_name = settings.model_names[0]
    alias = "" if name == own_name else f"another name of {own_name}: "
    return Model(
        id=name,
        created=state.started_at,
        root=own_name,
        description=alias + settings.model_description,
        languages=sorted(transcriber.languages.codes),
        max_upload_bytes=settings.max_upload_bytes,
        tasks=["transcribe", "translate"] if transcriber.can_translate else ["transcribe"],
    )


WEB: Final = Path(__file__).parent / "web"
HEADERS: Final = {
    "cache-control": "no-cache",  # asked again each time, and answered 304
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self' blob:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

page_routes = APIRouter(include_in_schema=False)


@page_routes.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    return FileResponse(WEB / "index.html", headers=HEADERS)


@page_routes.get("/favicon.ico")
async def icon() -> Response:
    return FileResponse(WEB / "icon.svg", headers=HEADERS, media_type="image/svg+xml")


class _WebFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def install_page(app: FastAPI) -> None:
    app.include_router(page_routes)
    app.mount("/web", _WebFiles(directory=WEB))


metrics_routes = APIRouter(tags=["operations"])


@metrics_routes.head("/metrics", include_in_schema=False)
@metrics_routes.get("/metrics", response_class=Response, responses=metrics_responses())
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    registry = CollectorRegistry()
    registry.register(_StateCollector(get_state(request)))
    text = generate_latest(counted.REGISTRY) + generate_latest(registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


class _StateCollector(Collector):
    def __init__(self, state: AppState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._realtime()
        yield from self._preprocessing()
        yield self._model()
        yield from self._replicas()

    def _model(self) -> Metric:
        """Describes the model; the device and the precision are known once the first replica is ready."""
        settings, engine = self._state.settings, self._state.dispatcher.engine
        served = {"model": settings.model_names[0], "revision": revision_of(Path(settings.model))}
        chosen = {"device": engine.device, "dtype": engine.dtype} if engine else {}
        return InfoMetricFamily("asr_model", "What is served.", value=served | chosen)

    def _requests(self) -> Iterator[Metric]:
        limiter = self._state.admission
        yield _gauge("asr_requests_in_flight", "Requests queued or transcribed.", limiter.num_in_flight)
        yield _counter("asr_requests_rejected", "Requests refused with 429.", limiter.num_rejected)
        yield _gauge("asr_chunks", "Chunks waiting and in flight.", self._state.dispatcher.num_chunks)

    def _realtime(self) -> Iterator[Metric]:
        sessions = self._state.realtime
        yield _gauge("asr_realtime_sessions", "Realtime sessions open.", sessions.num_active)
        yield _counter("asr_realtime_sessions_started", "Realtime sessions begun.", sessions.num_started)
        yield _counter(
            "asr_realtime_sessions_rejected", "Realtime sessions refused with 503.", sessions.num_rejected
        )
        yield _counter("asr_realtime_turns", "Realtime turns completed or failed.", sessions.num_turns)

    def _preprocessing(self) -> Iterator[Metric]:
        pool, stats = self._state.pool, self._state.pool.stats
        yield _gauge("asr_preprocess_workers", "Threads that decode and split audio.", pool.num_workers)
        yield _gauge("asr_preprocess_queue_depth", "Slices waiting for a thread.", stats.queued)
        yield _gauge("asr_preprocess_busy", "Threads at work.", stats.busy)
        yield _gauge("asr_preprocess_held_bytes", "Samples decoded, not yet in a chunk.", pool.held_bytes)
        yield _counter("asr_preprocess_slices", "Slices decoded.", stats.slices)
        yield _counter(
            "asr_preprocess_cancelled", "Slices dropped because their client had left.", stats.cancelled
        )
        yield _counter("asr_chunk_bytes", "Samples handed on in chunks.", stats.chunk_bytes)

    def _replicas(self) -> Iterator[Metric]:
        """Yields metrics as of each replica's last heartbeat; a replaced replica's counters begin anew."""
        states = {state.replica.name: state for state in self._state.dispatcher.supervisor.replica_states}
        yield _gauge("asr_ready", "1 while a replica takes work.", float(self._state.dispatcher.ready))
        ready = GaugeMetricFamily("asr_replica_ready", "1 while it takes work.", labels=["replica"])
        for name in (f"replica {index}" for index in range(self._state.dispatcher.supervisor.num_replicas)):
            ready.add_metric([name], float(name in states and states[name].ready))
        yield ready
        yield from _of_replicas(states)


def _of_replicas(states: Mapping[str, ReplicaState]) -> Iterator[Metric]:
    columns: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
        GaugeMetricFamily("asr_slots", "Chunks it can decode at once.", labels=["replica"]),
        GaugeMetricFamily("asr_slots_in_use", "Chunks it is decoding.", labels=["replica"]),
        CounterMetricFamily("asr_engine_steps", "Steps of the engine, idle ones too.", labels=["replica"]),
        CounterMetricFamily("asr_decode_steps", "Steps that decoded.", labels=["replica"]),
        CounterMetricFamily(
            "asr_decoded_tokens", "Tokens; by the decode steps: the mean batch.", labels=["replica"]
        ),
    )
    step_seconds = HistogramMetricFamily(
        "asr_engine_step_seconds", "Steps of the engine that had work.", labels=["replica"]
    )
    for name, state in states.items():
        beat = state.heartbeat
        values = (state.num_slots, beat.slots_in_use, beat.num_steps, beat.num_decode_steps)
        for column, value in zip(columns, (*values, beat.num_decoded_tokens), strict=True):
            column.add_metric([name], float(value))
        if beat.step_times.counts:
            step_seconds.add_metric([name], cumulative_buckets(beat.step_times), beat.step_times.sum_s)
    yield from columns
    yield step_seconds


def cumulative_buckets(times: StepTimes) -> list[tuple[str, float]]:
    """Adds to each bucket the counts of all smaller ones, as Prometheus expects."""
    bounds = [*map(str, STEP_TIME_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(times.counts)), strict=True))


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)
