"""The routes of operators: health and readiness probes, version, load, and the list of models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import JSONResponse, Response

from asr_server import __version__
from asr_server.api.auth import require_key
from asr_server.api.openapi_replies import OF_A_KEY, OF_A_MODEL, OF_AN_ENGINE, error_responses
from asr_server.api.request import check_model
from asr_server.api.schemas import Load, Model, ModelList, ReplicaLoad, Status, Version
from asr_server.api.state import AppState, get_state
from asr_server.dispatch.replica_state import ReplicaState

probes = APIRouter(tags=["operations"])
models = APIRouter(prefix="/v1/models", dependencies=[Depends(require_key)], tags=["models"])


@probes.head("/health", include_in_schema=False)  # load balancers often probe with HEAD
@probes.get("/health", response_model=Status, responses=error_responses(*OF_AN_ENGINE))
@probes.head("/ping", include_in_schema=False)
@probes.get("/ping", response_model=Status, responses=error_responses(*OF_AN_ENGINE))
async def health(request: Request) -> Response:
    """Live: the event loop turns. 503 only once every replica has been given up for good."""
    get_state(request).check_health()
    return JSONResponse({"status": "ok"})


@probes.head("/ready", include_in_schema=False)
@probes.get("/ready", response_model=Status, responses=error_responses(*OF_AN_ENGINE))
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
        replicas=[_replica(replica_state) for replica_state in state.dispatcher.replica_states],
    )


def _replica(replica_state: ReplicaState) -> ReplicaLoad:
    """As of the last heartbeat, at most a second or so ago."""
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


@models.get("", responses=error_responses(*OF_A_KEY))
async def list_models(request: Request) -> ModelList:
    """The model under each of its names."""
    state = get_state(request)
    return ModelList(data=[_model(name, state) for name in state.settings.model_names])


@models.get("/{name:path}", responses=error_responses(*OF_A_KEY, *OF_A_MODEL))
async def get_model(name: Annotated[str, Path(description="One of its names.")], request: Request) -> Model:
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
        tasks=["transcribe", "translate"] if transcriber.can_translate else ["transcribe"],
    )
