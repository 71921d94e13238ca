"""Swagger's page at `/docs`: all of it comes from this server, under a policy."""

import pytest

from asr_server.annexes.page import FILES
from tests.support.embedded import embedded
from tests.unit.api.running_app import run_app


@pytest.mark.parametrize("root_path", ["", "/asr"])
async def test_the_page_names_its_files_and_document_below_the_servers_path(root_path: str) -> None:
    async with run_app(embedded(root_path=root_path)) as app:
        reply = await app.client.get("/docs")
        page = reply.text
    for file in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert f'"{root_path}{FILES}/{file}"' in page
    assert f"url: '{root_path}/openapi.json'" in page
    assert "<title>asr-server - Swagger UI</title>" in page
    assert '"validatorUrl": null' in page
    assert "://" not in page
    assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self' ")
