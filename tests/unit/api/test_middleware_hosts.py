"""Pages of other sites, which a browser on the server's own machine would let in."""

from __future__ import annotations

import pytest

from tests.support.embedded import embedded
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.realtime.realtime_client import open_session, refused

PATHS = ["/", "/metrics", "/health", "/v1/models", "/v1/realtime", "/nowhere"]
FOREIGN = "https://evil.example"


def url(app: RunningApp) -> str:
    return f"http://{app.host}:{app.port}"


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
    refusal = await refused(url(app), additional_headers={"origin": origin})
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
        refusal = await refused(url(app), additional_headers={"origin": origin})
        assert (refusal.status, refusal.error["code"]) == (403, "origin_not_allowed")
        assert "--cors-origins" in refusal.error["message"]
        assert not app.app.state.server.realtime.num_started


async def test_the_servers_own_page_opens_a_session_and_so_does_a_client_without_an_origin(
    app: RunningApp,
) -> None:
    for headers in ({"origin": url(app)}, {"origin": url(app).replace("http", "https")}, {}):
        async with open_session(url(app), additional_headers=headers):
            pass


@pytest.mark.parametrize(
    "settings",
    [{"cors_origins": f"https://a.example,{FOREIGN}"}, {"cors_origins": "*"}, {"api_key": "s3cret"}],
)
async def test_a_page_that_is_allowed_or_has_the_key_opens_a_session(settings: dict[str, str]) -> None:
    headers = {"origin": FOREIGN, "authorization": "Bearer s3cret"}
    async with run_app(embedded(**settings)) as app, open_session(url(app), additional_headers=headers):
        pass
