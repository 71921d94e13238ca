"""HTTP routes beside those of recordings: probes, version, load, models."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathParameter
from starlette.responses import JSONResponse, Response

from asr_server import __version__
from asr_server.api.models import ServedModel
from asr_server.api.openapi import error_responses
from asr_server.api.schemas import Load, Model, ModelList, ReplicaLoad, Status, Version
from asr_server.api.state import AppState, get_state, models_of, require_key
from asr_server.dispatch.supervisor import ReplicaState
from asr_server.errors import EngineUnavailable, InvalidApiKey, ModelNotFound

Name = Annotated[str, PathParameter(description="One of its names.")]
probes = APIRouter(tags=["operations"])
models = APIRouter(prefix="/v1/models", dependencies=[Depends(require_key)], tags=["models"])


@probes.head("/health", include_in_schema=False)  # load balancers often probe with HEAD
@probes.get("/health", response_model=Status, responses=error_responses(EngineUnavailable))
@probes.head("/ping", include_in_schema=False)
@probes.get("/ping", response_model=Status, responses=error_responses(EngineUnavailable))
async def health(request: Request) -> Response:
    """Return 200 while the event loop runs, 503 once every replica has been given up."""
    get_state(request).models.check_health()
    return JSONResponse({"status": "ok"})


@probes.head("/ready", include_in_schema=False)
@probes.get("/ready", response_model=Status, responses=error_responses(EngineUnavailable))
async def ready(request: Request) -> Response:
    """Return 200 when an engine can take work, else 503."""
    get_state(request).models.require_ready()
    return JSONResponse({"status": "ready"})


@probes.head("/version", include_in_schema=False)
@probes.get("/version", responses=error_responses())
async def version() -> Version:
    """Return the server version."""
    return Version(version=__version__)


@probes.head("/load", include_in_schema=False)
@probes.get("/load", responses=error_responses())
async def load(request: Request) -> Load:
    """Return requests in flight, rejected requests, and each replica's work."""
    state = get_state(request)
    return Load(
        server_load=state.admission.num_in_flight,
        chunks=sum(model.dispatcher.num_chunks for model in state.models),
        rejected=state.admission.num_rejected,
        replicas=[
            _replica(model, replica_state)
            for model in state.models
            for replica_state in model.dispatcher.supervisor.replica_states
        ],
    )


def _replica(model: ServedModel, replica_state: ReplicaState) -> ReplicaLoad:
    heartbeat = replica_state.heartbeat
    return ReplicaLoad(
        model=model.name,
        name=replica_state.replica.name,
        ready=replica_state.ready,
        chunks_in_flight=len(replica_state.in_flight),
        num_steps=heartbeat.num_steps,
        slots_in_use=heartbeat.slots_in_use,
        num_decode_steps=heartbeat.num_decode_steps,
        num_decoded_tokens=heartbeat.num_decoded_tokens,
    )


@models.get("", responses=error_responses(InvalidApiKey))
async def list_models(request: Request) -> ModelList:
    """Return every model that the key may use, under each of its names."""
    state, models = get_state(request), models_of(request)
    return ModelList(data=[describe_model(name, model, state) for model in models for name in model.names])


@models.get("/{name:path}", responses=error_responses(InvalidApiKey, ModelNotFound))
async def get_model(name: Name, request: Request) -> Model:
    """Return the model under one name."""
    return describe_model(name, models_of(request).choose(name), get_state(request))


def describe_model(name: str, model: ServedModel, state: AppState) -> Model:
    settings, transcriber, own_name = model.settings, model.transcriber, model.name
    alias = "" if name == own_name else f"another name of {own_name}: "
    return Model(
        id=name,
        created=state.started_at,
        root=own_name,
        state=model.state,
        description=alias + settings.model_description,
        languages=model.languages,
        max_upload_bytes=state.max_upload_bytes,
        tasks=["transcribe", "translate"] if transcriber.can_translate else ["transcribe"],
        background=state.take_in_background is not None,
    )
