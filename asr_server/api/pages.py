"""The page at `/`: static files of this package, nothing from other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

WEB: Final = Path(__file__).parent / "web"
HEADERS: Final = {
    "cache-control": "no-cache",  # asked again each time, and answered 304
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    return FileResponse(WEB / "index.html", headers=HEADERS)


@router.get("/favicon.ico")
async def icon() -> Response:
    return FileResponse(WEB / "icon.svg", headers=HEADERS, media_type="image/svg+xml")


class _WebFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def install(app: FastAPI) -> None:
    app.include_router(router)
    app.mount("/web", _WebFiles(directory=WEB))
