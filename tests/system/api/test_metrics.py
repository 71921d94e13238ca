"""What `/metrics` tells. The counts are of the process, so that tests look at what changes."""

import asyncio
import socket
import time
from pathlib import Path
from typing import get_args

import httpx
import psutil
import pytest

from asr_server import __version__
from asr_server.audio.recording import Recording
from asr_server.metrics import RestartReason
from tests import conftest
from tests.conftest import WITHOUT_ENGINE, Server
from tests.support.embedded import embedded
from tests.support.memory_file import MemoryFile
from tests.support.raw_client import FILE_PART, RawClient
from tests.support.until import until, wait_until
from tests.unit.api.figures import Figures, figures_of, growth, read
from tests.unit.api.running_app import SECOND, THREE_CHUNKS, RunningApp, run_app

REPLICA = 'model="whisper-digits",replica="replica 0"'
DIGITS = Path(__file__).parents[2] / "data" / "digits.wav"


def restarts(reason: str) -> str:
    return f'asr_replica_restarts_total{{reason="{reason}"}}'


def transcribed(route: str, language: str) -> str:
    return f'asr_audio_transcribed_seconds_total{{language="{language}",route="{route}"}}'


async def test_what_was_decoded_is_counted_once_it_is_done_and_what_its_request_took(
    app: RunningApp,
) -> None:
    before = await read(app)
    await app.post(THREE_CHUNKS)
    await app.post(b"no audio")
    after = await read(app)
    for name in ("asr_audio_received_seconds_total", transcribed("/v1/audio/transcriptions", "en")):
        assert growth(before, after, name) == pytest.approx(75)
    assert after["asr_chunk_bytes_total"] == 75 * 16_000 * 4
    slices = after["asr_preprocess_slices_total"]
    assert slices >= 2  # the first chunk leaves alone
    for name in ("asr_preprocess_seconds", "asr_preprocess_wait_seconds"):
        assert growth(before, after, f"{name}_count") >= slices
        assert growth(before, after, f'{name}_bucket{{le="+Inf"}}') >= slices
    assert after["asr_preprocess_workers"] == app.pool.num_workers
    labels = 'route="/v1/audio/transcriptions"'
    assert growth(before, after, f"asr_request_audio_seconds_sum{{{labels}}}") == pytest.approx(75)
    for name in ("audio_seconds", "rtfx"):
        assert growth(before, after, f"asr_request_{name}_count{{{labels}}}") == 1
    assert growth(before, after, f"asr_request_rtfx_sum{{{labels}}}") > 0


async def test_requests_are_counted_by_route_and_status_and_timed(app: RunningApp) -> None:
    before = await read(app)
    await app.post()
    await app.post(b"no audio")
    await app.client.get("/nowhere/at/all")
    await app.client.get("/v1/models/whisper-1")
    after = await read(app)
    route = "/v1/audio/transcriptions"
    for labels in (
        f'route="{route}",status="200"',
        f'route="{route}",status="400"',
        'route="other",status="404"',
        'route="/v1/models/{name:path}",status="200"',
    ):
        assert growth(before, after, f"asr_requests_total{{{labels}}}") == 1, labels
    assert growth(before, after, f'asr_request_seconds_count{{route="{route}"}}') == 2
    assert growth(before, after, "asr_time_to_first_text_seconds_count") == 1
    assert not any("nowhere" in name for name in after)


async def test_a_server_that_is_not_ready_has_made_no_error(app: RunningApp) -> None:
    before = await read(app)
    app.dispatcher.drain()
    assert (await app.client.get("/ready")).status_code == 503
    after = await read(app)
    assert growth(before, after, 'asr_requests_total{route="/ready",status="503"}') == 0
    assert growth(before, after, 'asr_requests_total{route="/ready",status="not_ready"}') == 1


async def test_a_client_cannot_add_series_by_asking_for_paths_that_are_not_there(app: RunningApp) -> None:
    await app.client.get("/a")
    before = await read(app)
    for i in range(20):
        await app.client.get(f"/nowhere/{i}")
    assert set(await read(app)) == set(before)


async def test_samples_that_wait_for_the_rest_of_their_chunk_are_counted(app: RunningApp) -> None:
    with Recording(MemoryFile(THREE_CHUNKS)) as recording:
        await app.pool.decode_slice(recording)
        assert (await read(app))["asr_preprocess_held_bytes"] == recording.held_bytes > 0
    assert (await read(app))["asr_preprocess_held_bytes"] == 0


async def test_readiness_is_0_and_not_absent_while_no_replica_lives() -> None:
    async with run_app(embedded()) as app:
        before = await read(app)
        ready = ('asr_ready{model="whisper-digits"}', f"asr_replica_ready{{{REPLICA}}}")
        assert [before[name] for name in ready] == [1, 1]
        app.replica.before_launch = asyncio.Event().wait  # for ever
        app.replica.die()
        await until(lambda: not app.dispatcher.supervisor.replica_states)
        while not growth(before, after := await read(app), restarts("exited")):
            await asyncio.sleep(0.01)
        assert [after[name] for name in ready] == [0, 0]
        assert growth(before, after, restarts("exited")) == 1


async def test_chunks_that_wait_are_told_from_those_at_replicas_and_places_from_lines() -> None:
    async with run_app(embedded(max_concurrent_requests=1), credit=2) as app:
        app.replica.holding = True
        late, rest = await RawClient.connect(app.host, app.port), SECOND + b"\r\n--limit--\r\n"
        late.begin_upload(len(FILE_PART) + len(rest))
        await until(lambda: app.app.state.server.admission.num_open)
        asking = asyncio.create_task(app.post(THREE_CHUNKS))
        await until(lambda: app.replica.held)
        late.send(rest)
        names = [f"asr_chunks_in_flight{{{REPLICA}}}", 'asr_chunks_waiting{model="whisper-digits"}']
        names += ["asr_requests_in_flight", "asr_requests_waiting", "asr_request_places"]
        while [(figures := await read(app)).get(name) for name in names] != [2, 1, 1, 1, 1]:
            assert not asking.done(), figures
        asking.cancel()
        await late.close()


def test_the_times_of_a_chunk_and_of_the_engines_steps_are_told(server: Server) -> None:
    def read() -> Figures:
        return figures_of(server.get("/metrics"))

    before = read()
    with DIGITS.open("rb") as file:
        httpx.post(
            f"{server.url}/v1/audio/transcriptions",
            files={"file": file},
            data={"model": "whisper-1"},
            timeout=60,
        )
    after = read()
    num_chunks = growth(before, after, 'asr_chunks_transcribed_total{temperature="0"}')
    assert num_chunks >= 1
    for phase in ("queue", "encode", "decode"):
        assert growth(before, after, f"asr_chunk_{phase}_seconds_count") == num_chunks
    for phase in ("encode", "decode"):
        assert growth(before, after, f"asr_chunk_{phase}_seconds_sum") > 0
    steps = f"asr_engine_step_seconds_{{}}{{{{{REPLICA}}}}}"
    wait_until(lambda: growth(before, read(), steps.format("count")) >= 2)  # with the next heartbeat
    assert growth(before, read(), steps.format("sum")) > 0


def test_what_runs_is_told_beside_the_processs_own_figures(server: Server) -> None:
    text = server.get("/metrics").text
    (build,) = [line for line in text.splitlines() if line.startswith("asr_build_info{")]
    assert f'version="{__version__}"' in build
    (model,) = [line for line in text.splitlines() if line.startswith("asr_model_info{")]
    for label in ('model="whisper-digits"', 'device="cpu"', 'dtype="', 'revision=""'):
        assert label in model
    figures = figures_of(server.get("/metrics"))
    assert figures["process_resident_memory_bytes"] > 1 << 20
    assert figures["process_open_fds"] > 0
    assert {"asr_decode_process_deaths_total", *map(restarts, get_args(RestartReason))} <= set(figures)


def test_memory_and_processor_time_of_each_child_process_are_told(server: Server) -> None:
    with DIGITS.open("rb") as file:
        httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": file}, timeout=60)
    figures = figures_of(server.get("/metrics"))
    (replica,) = [
        child
        for child in psutil.Process(server.process.pid).children()
        if child.cmdline()[0].startswith("asr-server replica")
    ]
    resident_bytes = figures[f"asr_replica_resident_memory_bytes{{{REPLICA}}}"]
    assert resident_bytes == pytest.approx(replica.memory_info().rss, rel=0.2)
    times = replica.cpu_times()
    assert 0 < figures[f"asr_replica_cpu_seconds_total{{{REPLICA}}}"] <= times.user + times.system + 0.01
    assert figures["asr_decode_processes"] >= 1
    assert figures["asr_decode_resident_memory_bytes"] > 1 << 20
    assert figures["asr_decode_cpu_seconds_total"] > 0


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
            reply = await watcher.get("/metrics", headers={"host": "evil.example"})
            assert reply.json()["error"]["code"] == "host_not_allowed", "no other site's page reads it"


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
