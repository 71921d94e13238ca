"""`--metrics-port`: metrics and probes there alone, for whoever reaches it, as long as the server lives."""

import socket
import time

import httpx
import pytest

from tests import conftest
from tests.conftest import WITHOUT_ENGINE
from tests.support.embedded import embedded
from tests.unit.api.figures import figures_of
from tests.unit.api.running_app import run_app

KEY = "a-key-of-twenty-letters"
HALF_AN_UPLOAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
    b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 1000\r\n\r\n"
)


def address_in(printed: str) -> str:
    (url,) = [line.split()[-1] for line in printed.splitlines() if line.startswith("metrics on ")]
    return url.removesuffix("/metrics")


async def test_metrics_move_to_their_port_and_probes_are_at_both(capsys: pytest.CaptureFixture[str]) -> None:
    async with run_app(embedded(metrics_port=0)) as app:
        url = address_in(capsys.readouterr().out)
        async with httpx.AsyncClient(base_url=url) as watcher:
            assert figures_of(await watcher.get("/metrics"))["asr_requests_in_flight"] == 0
            assert (await app.client.get("/metrics")).status_code == 404
            for path in ("/health", "/ready"):
                assert (await watcher.get(path)).status_code == 200
                assert (await app.client.get(path)).status_code == 200
            assert (await watcher.head("/metrics")).content == b""
            assert (await watcher.get("/metrics")).headers["x-request-id"]
            for path in ("/", "/v1/models", "/docs", "/openapi.json"):
                assert (await watcher.get(path)).status_code == 404
        assert "/metrics" not in (await app.client.get("/openapi.json")).json()["paths"]
    async with httpx.AsyncClient() as watcher:
        with pytest.raises(httpx.ConnectError):
            await watcher.get(url)


async def test_the_port_asks_for_no_key_and_says_why_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    async with run_app(embedded(metrics_port=0, api_key=KEY)) as app:
        assert (await app.client.get("/v1/models")).status_code == 401
        async with httpx.AsyncClient(base_url=address_in(capsys.readouterr().out)) as watcher:
            assert (await watcher.get("/metrics")).status_code == 200
            app.dispatcher.drain()
            assert "shutting down" in (await watcher.get("/ready")).json()["error"]["message"]


async def test_no_other_sites_page_reads_it_by_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    async with run_app(embedded(metrics_port=0, api_key=KEY)):
        url = address_in(capsys.readouterr().out)
        async with httpx.AsyncClient(base_url=url, headers={"host": "evil.example"}) as watcher:
            assert (await watcher.get("/metrics")).json()["error"]["code"] == "host_not_allowed"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_the_port_has_an_address_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    async with run_app(embedded(metrics_port=0, metrics_host="::")) as app:
        port = address_in(capsys.readouterr().out).rpartition(":")[2]
        assert app.host == "127.0.0.1"
        async with httpx.AsyncClient() as watcher:
            for host in ("127.0.0.1", "[::1]"):
                assert (await watcher.get(f"http://{host}:{port}/health")).status_code == 200


@pytest.mark.slow
def test_a_server_that_drains_still_answers_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with conftest.run_server(*WITHOUT_ENGINE, "--metrics-port", str(port)) as server:
        host, _, api_port = server.url.rpartition("/")[2].partition(":")
        with socket.create_connection((host, int(api_port)), timeout=30) as client:
            client.sendall(HALF_AN_UPLOAD)
            assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
            server.process.terminate()
            watched = f"http://127.0.0.1:{port}"
            while (reply := httpx.get(f"{watched}/ready")).status_code == 200:
                time.sleep(0.02)
            assert reply.status_code == 503
            assert figures_of(httpx.get(f"{watched}/metrics"))["asr_requests_in_flight"] == 0
        assert server.process.wait(60) == 0
