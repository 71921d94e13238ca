"""The page's files over plain HTTP. `test_page_in_browser.py` uses it."""

import re

import pytest

from asr_server.annexes.page import FILES, WEB
from tests.support.embedded import embedded
from tests.unit.api.running_app import RunningApp, run_app

NAMES = sorted(path.name for path in WEB.iterdir())


async def test_the_page_is_served_with_a_policy_that_keeps_other_hosts_out(app: RunningApp) -> None:
    reply = await app.client.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert (await app.client.head("/")).status_code == 200


@pytest.mark.parametrize("name", NAMES)
async def test_every_file_is_served_with_its_type(app: RunningApp, name: str) -> None:
    reply = await app.client.get(f"/web/{name}")
    types = {
        "js": "javascript",
        "css": "text/css",
        "html": "text/html",
        "svg": "image/svg",
        "mp3": "audio/mpeg",
    }
    types["webmanifest"] = "application/manifest+json"
    assert reply.status_code == 200
    assert types[name.rpartition(".")[2]] in reply.headers["content-type"]
    assert "content-security-policy" in reply.headers


async def test_nothing_but_the_pages_files_is_served(app: RunningApp) -> None:
    for path in ("/web/../pages.py", "/web/%2e%2e/pages.py", "/web/nothing.js", "/web/"):
        assert (await app.client.get(path)).status_code == 404


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host(name: str) -> None:
    text = (WEB / name).read_text(errors="replace")
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {
        "http://www.w3.org/2000/svg",  # name spaces, no addresses
        "http://schemas.openxmlformats.org",
    }


async def test_the_stream_for_the_page_ends_with_the_segments(app: RunningApp) -> None:
    reply = await app.post(stream="true", stream_include_segments="true")
    assert '"segments":[{"id":0' in reply.text
    assert '"duration":1.0' in reply.text
    assert '"segments"' not in (await app.post(stream="true")).text


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
