"""HTTP routes beside those of recordings: probes, version, load, models, the page, the API's description.

The page is static files of this package. `/docs` is Swagger's page from local files, under a policy that
loads nothing from elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi import Path as PathParameter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from asr_server import __version__
from asr_server.api.models import ServedModel
from asr_server.api.openapi import (
    ENGINE_ERRORS,
    KEY_ERRORS,
    MODEL_ERRORS,
    error_responses,
)
from asr_server.api.schemas import (
    Load,
    Model,
    ModelList,
    ReplicaLoad,
    Status,
    Version,
)
from asr_server.api.state import AppState, get_state, models_of, require_key
from asr_server.dispatch.supervisor import ReplicaState

probes = APIRouter(tags=["operations"])
models = APIRouter(prefix="/v1/models", dependencies=[Depends(require_key)], tags=["models"])


@probes.head("/health", include_in_schema=False)  # load balancers often probe with HEAD
@probes.get("/health", response_model=Status, responses=error_responses(*ENGINE_ERRORS))
@probes.head("/ping", include_in_schema=False)
@probes.get("/ping", response_model=Status, responses=error_responses(*ENGINE_ERRORS))
async def health(request: Request) -> Response:
    """Return 200 while the event loop runs, 503 once every replica has been given up."""
    get_state(request).models.check_health()
    return JSONResponse({"status": "ok"})


@probes.head("/ready", include_in_schema=False)
@probes.get("/ready", response_model=Status, responses=error_responses(*ENGINE_ERRORS))
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


@models.get("", responses=error_responses(*KEY_ERRORS))
async def list_models(request: Request) -> ModelList:
    """Return every model that the key may use, under each of its names."""
    state, models = get_state(request), models_of(request)
    return ModelList(
        data=[describe_model(name, model, state) for model in models for name in model.settings.model_names]
    )


@models.get("/{name:path}", responses=error_responses(*KEY_ERRORS, *MODEL_ERRORS))
async def get_model(
    name: Annotated[str, PathParameter(description="One of its names.")], request: Request
) -> Model:
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
    )


# -- Pages ---------------------------------------------------------------------------------------------------

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


FILES: Final = "/static-offline-docs"  # where FastAPIOffline has put them
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def install_docs_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        page = get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=f"{app.title} - Swagger UI",
            swagger_js_url=f"{root}{FILES}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{FILES}/swagger-ui.css",
            swagger_favicon_url=f"{root}{FILES}/favicon.png",
            swagger_ui_parameters=app.swagger_ui_parameters,
        )
        page.headers["content-security-policy"] = _POLICY
        return page
