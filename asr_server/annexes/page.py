"""The page, and the API's description at `/docs`: local files that load nothing from elsewhere."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

WEB: Final = Path(__file__).parent / "web"
HEADERS: Final = {
    "cache-control": "no-cache",  # asked again each time, and answered 304
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self' blob:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

FILES: Final = "/static-offline-docs"  # where FastAPIOffline has put them
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

page_routes = APIRouter(include_in_schema=False)


@page_routes.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    return FileResponse(WEB / "index.html", headers=HEADERS)


@page_routes.get("/favicon.ico")
async def icon() -> Response:
    return FileResponse(WEB / "icon.svg", headers=HEADERS, media_type="image/svg+xml")


@page_routes.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    app, root = request.app, request.scope.get("root_path", "")
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


class _WebFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def install(app: FastAPI) -> None:
    app.include_router(page_routes)
    app.mount("/web", _WebFiles(directory=WEB))
