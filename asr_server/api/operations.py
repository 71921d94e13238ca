"""Probes, and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from asr_server import __version__
from asr_server.api.auth import require_key
from asr_server.api.job import check_model
from asr_server.api.rooms import Rooms, rooms_of
from asr_server.api.schemas import Model, ModelList
from asr_server.errors import EngineUnavailable
from asr_server.workers.supervisor import Link

probes = APIRouter(tags=["operations"])
models = APIRouter(prefix="/v1/models", dependencies=[Depends(require_key)], tags=["models"])


@probes.get("/health")
@probes.get("/ping")
async def health(request: Request) -> Response:
    """Live: the event loop turns. 503 only once an engine has been given up for good."""
    if rooms_of(request).dispatcher.given_up:
        raise EngineUnavailable("The engine has failed and is not being restarted.", retry_after_s=60)
    return JSONResponse({"status": "ok"})


@probes.get("/ready")
async def ready(request: Request) -> Response:
    """An engine can take work. 503 while loading or once given up."""
    rooms_of(request).require_engine()
    return JSONResponse({"status": "ready"})


@probes.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@probes.get("/load")
async def load(request: Request) -> dict[str, Any]:
    """Requests in the building, what has become of them so far, and what each replica is doing."""
    rooms = rooms_of(request)
    return {
        "server_load": rooms.waiting_room.num_inside,
        "chunks": rooms.dispatcher.num_chunks,
        "refused": rooms.waiting_room.num_refused,
        "replicas": [_replica(link) for link in rooms.dispatcher.links],
    }


def _replica(link: Link) -> dict[str, Any]:
    """As of the last heartbeat, at most a second or so ago."""
    return {
        "name": link.replica.name,
        "ready": link.ready,
        "chunks_in_flight": len(link.in_flight),
        **msgspec.structs.asdict(link.heartbeat),
    }


@models.get("")
async def list_models(request: Request) -> ModelList:
    rooms = rooms_of(request)
    return ModelList(data=[_model(name, rooms) for name in rooms.settings.model_names])


@models.get("/{name:path}")
async def get_model(name: str, request: Request) -> Model:
    rooms = rooms_of(request)
    check_model(name, rooms.settings)
    return _model(name, rooms)


def _model(name: str, rooms: Rooms) -> Model:
    return Model(id=name, created=rooms.started_at)
