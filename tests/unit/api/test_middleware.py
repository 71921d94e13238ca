"""What every reply has, bodies that still come, pages of other sites, recordings past FastAPI's routing."""

import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from fastapi.routing import APIRoute
from openai import AsyncOpenAI
from starlette.responses import StreamingResponse

import asr_server
from asr_server.api import middleware as middleware
from asr_server.api.middleware import PlainRoutes
from asr_server.api.schemas import SAFE_HEADERS
from asr_server.config import MIB
from asr_server.metrics import REGISTRY
from asr_server.telemetry import JsonFormatter, TextFormatter
from tests.contract.official_client import transcribe
from tests.support.embedded import embedded
from tests.support.raw_client import RawClient
from tests.unit.api.figures import growth, read
from tests.unit.api.running_app import MODEL, SECOND, RunningApp, error_of, run_app
from tests.unit.realtime.realtime_client import open_session, refused

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
        url = f"{app.url}/v1"
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


PATHS = ["/", "/metrics", "/health", "/v1/models", "/v1/realtime", "/nowhere"]
FOREIGN = "https://evil.example"


@pytest.mark.parametrize("path", PATHS)
async def test_a_name_that_a_stranger_resolves_to_this_machine_is_refused(app: RunningApp, path: str) -> None:
    reply = await app.client.get(path, headers={"host": f"evil.example:{app.port}"})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in reply.json()["error"]["message"]
    assert reply.headers["x-request-id"]


async def test_a_long_name_is_repeated_in_part(app: RunningApp) -> None:
    reply = await app.client.get("/health", headers={"host": "x" * 201})
    assert f"it does not answer as '{'x' * 200}'. Allow" in reply.json()["error"]["message"]
    origin = f"https://{'x' * 200}"
    refusal = await refused(app.url, additional_headers={"origin": origin})
    assert f"Pages of '{origin[:200]}' may open no session" in refusal.error["message"]


async def test_a_handshake_by_a_strangers_name_is_refused(app: RunningApp) -> None:
    refusal = await refused(f"http://evil.example:{app.port}", host=app.host, port=app.port)
    assert (refusal.status, refusal.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "name", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "[::1]", "asr.localhost"]
)
@pytest.mark.parametrize("port", ["", ":8000"])
async def test_names_of_this_machine_are_served(app: RunningApp, name: str, port: str) -> None:
    reply = await app.client.get("/v1/models", headers={"host": name + port})
    assert reply.status_code == 200


async def test_a_name_that_is_allowed_is_served() -> None:
    async with run_app(embedded(allowed_hosts="asr.example, other.example")) as app:
        for name, status in (("ASR.example:80", 200), ("other.example", 200), ("evil.example", 403)):
            assert (await app.client.get("/health", headers={"host": name})).status_code == status


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"api_key": "s3cret"}, {"allowed_hosts": "*"}])
async def test_beyond_loopback_or_with_a_key_every_name_is_served(settings: dict[str, str]) -> None:
    async with run_app(embedded(**settings)) as app:
        assert (await app.client.get("/health", headers={"host": "asr.internal"})).status_code == 200


@pytest.mark.parametrize("origin", [FOREIGN, "http://127.0.0.1:1", "null", "file://", ""])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_page_of_another_site_opens_no_session(origin: str, host: str) -> None:
    async with run_app(embedded(host=host)) as app:
        refusal = await refused(app.url, additional_headers={"origin": origin})
        assert (refusal.status, refusal.error["code"]) == (403, "origin_not_allowed")
        assert "--cors-origins" in refusal.error["message"]
        assert not app.app.state.server.realtime.num_started


async def test_the_servers_own_page_and_a_client_without_an_origin_open_a_session(app: RunningApp) -> None:
    for headers in ({"origin": app.url}, {"origin": app.url.replace("http", "https")}, {}):
        async with open_session(app.url, additional_headers=headers):
            pass


@pytest.mark.parametrize(
    "settings",
    [{"cors_origins": f"https://a.example,{FOREIGN}"}, {"cors_origins": "*"}, {"api_key": "s3cret"}],
)
async def test_a_page_that_is_allowed_or_has_the_key_opens_a_session(settings: dict[str, str]) -> None:
    headers = {"origin": FOREIGN, "authorization": "Bearer s3cret"}
    async with run_app(embedded(**settings)) as app, open_session(app.url, additional_headers=headers):
        pass


PATH = "/v1/audio/transcriptions"
KEY = {"authorization": "Bearer right"}
FILE = {"file": SECOND}


class Asked(NamedTuple):
    method: str = "POST"
    path: str = PATH
    headers: dict[str, str] = KEY
    data: dict[str, str] = MODEL
    files: dict[str, bytes] | None = FILE


REQUESTS = {
    "json": Asked(),
    "stream": Asked(data=MODEL | {"stream": "true"}),
    "translation": Asked(path="/v1/audio/translations"),
    "no key": Asked(headers={}),
    "wrong key": Asked(headers={"authorization": "Bearer wrong"}),
    "no form": Asked(files=None),
    "no audio": Asked(files={"file": b"no audio"}),
    "other model": Asked(data={"model": "other"}),
    "unknown field": Asked(data=MODEL | {"no_such_field": "1"}),
    "other method": Asked("GET"),
    "options": Asked("OPTIONS"),
    "slash": Asked(path=PATH + "/"),
    "nowhere": Asked(path=PATH + "x"),
    "behind a prefix": Asked(path="/prefix" + PATH),
}


@pytest.fixture(params=["", "/prefix"])
async def keyed(request: pytest.FixtureRequest) -> AsyncIterator[RunningApp]:
    settings = embedded(api_key="right", root_path=request.param)
    async with run_app(settings, languages=("en", "de")) as app:
        yield app


async def ask(app: RunningApp, asked: Asked) -> tuple[Any, ...]:
    """The reply, and for which routes it was counted."""
    before = counted()
    reply: httpx.Response = await app.client.request(
        asked.method, asked.path, headers=asked.headers, data=asked.data, files=asked.files
    )
    own = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
    assert reply.headers["x-request-id"]
    return (
        reply.status_code,
        own,
        reply.content,
        {key for key, n in counted().items() if n != before.get(key)},
    )


def counted() -> dict[tuple[str, str], float]:
    return {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "asr_requests_total"
    }


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_reply_is_the_one_that_fastapi_gives(
    keyed: RunningApp, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = REQUESTS[name]
    plain = await ask(keyed, asked)
    assert (plain[0] == 200) == (name in ("json", "stream", "translation", "slash"))
    monkeypatch.setattr(PlainRoutes, "_route_of", lambda self, scope: None)
    assert plain == await ask(keyed, asked)


async def test_a_recording_skips_fastapis_routes(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise AssertionError("FastAPI's route was used")

    monkeypatch.setattr(APIRoute, "handle", fail)
    assert (await app.post()).status_code == 200
    assert (await app.client.get("/v1/models")).status_code == 500


@pytest.mark.parametrize("path", [PATH, "/v1/models", "/v1/models/whisper-1", "/health", "/docs", ""])
async def test_a_slash_at_the_end_of_a_path_changes_nothing(keyed: RunningApp, path: str) -> None:
    method, files = ("POST", FILE) if path == PATH else ("GET", None)
    status, _, _, counted_for = await ask(keyed, Asked(method, f"{path}/", files=files))
    assert status == 200
    assert not any("other" in str(key) for key in counted_for)


async def test_a_websocket_at_an_unknown_path_is_an_error_of_ours(app: RunningApp) -> None:
    refusal = await refused(app.url, "/nowhere")
    assert (refusal.status, refusal.error["type"]) == (404, "invalid_request_error")
    assert refusal.headers["x-request-id"]
