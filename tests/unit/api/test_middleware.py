"""What every reply has: an id, a line, an error body, and a reply that arrives before its body was read."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from starlette.responses import StreamingResponse

import asr_server
from asr_server.api import middleware as middleware
from asr_server.api.headers import SAFE_HEADERS
from asr_server.config import MIB
from asr_server.telemetry import JsonFormatter, TextFormatter
from tests.contract.official_client import transcribe
from tests.support.embedded import embedded
from tests.support.raw_client import RawClient
from tests.unit.api.figures import growth, read
from tests.unit.api.running_app import RunningApp, error_of, run_app

SMALL = embedded(max_upload_bytes=MIB)
ROUTE = "/v1/audio/transcriptions"


async def test_a_failed_requests_line_and_metric_have_the_code_of_its_error(
    app: RunningApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api.middleware")
    before = await read(app)
    await app.post(b"no audio")
    after = await read(app)
    (record,) = (record for record in caplog.records if ROUTE in record.getMessage())
    assert "; error invalid_audio" in record.getMessage()
    assert json.loads(JsonFormatter("api").format(record))["error"] == "invalid_audio"
    counted = f'asr_request_errors_total{{code="invalid_audio",route="{ROUTE}"}}'
    assert growth(before, after, counted) == 1


async def test_a_fault_before_the_reply_is_a_500_and_behind_its_begin_ends_the_connection(
    app: RunningApp, caplog: pytest.LogCaptureFixture
) -> None:
    @app.app.get("/before")
    async def before() -> None:
        raise ZeroDivisionError("secret")

    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("secret")

    @app.app.get("/behind")
    async def behind() -> StreamingResponse:
        return StreamingResponse(half())

    caplog.handler.setFormatter(TextFormatter("api"))
    reply = await app.client.get("/before", headers={"x-request-id": "find-me"})
    assert (reply.status_code, error_of(reply)["type"], "secret" in reply.text) == (
        500,
        "server_error",
        False,
    )
    (line,) = [line for line in caplog.text.splitlines() if "GET failed" in line]
    assert "find-me" in line
    assert "ZeroDivisionError" in caplog.text
    client = await RawClient.connect(app.host, app.port)
    client.ask("/behind")
    received = await client.reader.read()
    await client.close()
    assert received.startswith(b"HTTP/1.1 200")
    assert not received.endswith(b"0\r\n\r\n")
    assert caplog.text.count("GET failed") == 2


async def test_every_header_of_ours_is_shown_to_pages_of_allowed_origins() -> None:
    page = {"origin": "app://obsidian.md"}
    async with run_app(embedded(cors_origins=page["origin"])) as app:
        reply = await app.client.get("/nowhere", headers=page)
        asked = page | {"access-control-request-method": "POST"}
        preflight = await app.client.options("/v1/models", headers=asked)
    assert reply.headers["access-control-allow-origin"] == page["origin"]
    exposed = {*reply.headers["access-control-expose-headers"].lower().split(", ")}
    assert exposed >= {"retry-after", "x-ratelimit-reset-requests"} | headers_in_the_code()
    assert preflight.headers["x-request-id"].startswith("req_")


def headers_in_the_code() -> set[str]:
    """Every name of a header of ours that the code writes, so that none is forgotten in the table."""
    text = "".join(path.read_text() for path in Path(asr_server.__file__).parent.rglob("*.py"))
    found = {name.lower() for name in re.findall(r'"(x-[a-z0-9-]+)"', text, re.IGNORECASE)}
    return found - SAFE_HEADERS.keys()


# -- Bodies that are still being sent --


async def test_the_official_client_sees_the_413_of_an_upload_far_over_the_limit() -> None:
    async with run_app(SMALL) as app:
        url = f"http://{app.host}:{app.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await transcribe(client, bytes(40 * MIB))
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
        assert await app.still_works()


async def test_the_rest_of_an_upload_that_is_refused_is_read_for_the_clients_grace_and_no_longer() -> None:
    async with run_app(embedded(max_upload_bytes=MIB, client_grace_s=2.0)) as app:
        client = await RawClient.connect(app.host, app.port)
        client.begin_upload(1 << 40)
        assert (await client.reply()).status == 413
        client.send(bytes(65536))
        assert await client.is_closed()
        await client.close()


async def test_a_client_that_was_refused_before_it_might_send_its_body_is_not_kept() -> None:
    async with run_app(SMALL) as app:
        client = await RawClient.connect(app.host, app.port)
        head = "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
        client.send(f"{head}content-length: {1 << 40}\r\n\r\n".encode())
        assert (await client.reply()).status == 413
        assert await client.is_closed()
        await client.close()


async def test_a_refusal_of_a_body_that_has_come_whole_keeps_the_connection() -> None:
    async with run_app(SMALL) as app:
        reply = await app.post(b"no audio")
        assert (reply.status_code, reply.headers.get("connection")) == (400, None)
