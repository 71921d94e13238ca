"""Swagger's page at `/docs`: all of it comes from this server, under a policy that runs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from fastapi import FastAPI

from asr_server.api.docs_page import FILES, install_docs_page
from tests.api.running_app import RunningApp, run_app
from tests.embedded import embedded


@pytest.mark.parametrize("root_path", ["", "/asr"])
async def test_the_page_names_its_files_and_document_below_the_servers_path(root_path: str) -> None:
    async with run_app(embedded(root_path=root_path)) as app:
        page = (await app.client.get("/docs")).text
    for file in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert f'"{root_path}{FILES}/{file}"' in page
    assert f"url: '{root_path}/openapi.json'" in page
    assert "<title>asr-server - Swagger UI</title>" in page
    assert '"validatorUrl": null' in page
    assert "://" not in page


async def test_the_policy_allows_the_pages_own_script_by_its_hash(app: RunningApp) -> None:
    reply = await app.client.get("/docs")
    (script,) = re.findall(r"<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")


def test_the_page_is_not_part_of_the_document() -> None:
    app = FastAPI()
    install_docs_page(app)
    assert "/docs" not in app.openapi()["paths"]
