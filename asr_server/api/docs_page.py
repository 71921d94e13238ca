"""Serve Swagger's page at `/docs` from local files, under a policy that runs no other script."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

FILES: Final = "/static-offline-docs"  # where FastAPIOffline has put them
_INLINE_SCRIPT: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


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
        page.headers["content-security-policy"] = _policy(bytes(page.body))
        return page


def _policy(page: bytes) -> str:
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in _INLINE_SCRIPT.findall(page))
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _digest(script: bytes) -> str:
    return base64.b64encode(hashlib.sha256(script).digest()).decode()
