"""How the server starts, warns, drains and ends: before a fake replica, in a copy of this process, whole."""

import asyncio
import importlib
import io
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

import tests.unit.wyoming.wyoming_client  # noqa: F401  before a test imports the package, which warns
from asr_server.api.models import Models, ServedModel
from asr_server.audio.recording import PreprocessPool
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import AudioWindow
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import MAX_FAILED_STARTS, ReplicaLimits, StartImpossible
from asr_server.server import app as app_module
from asr_server.server import run as run_module
from asr_server.server.app import create_app
from asr_server.server.run import ENGINE_FAILED, PORT_TAKEN, STOPPED, run, start_traces
from asr_server.server.settings import ServerSettings
from asr_server.telemetry import configure_logging
from tests.conftest import WITHOUT_ENGINE, Server, run_server
from tests.support.commands import run_command
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica
from tests.support.forked import Fork
from tests.support.tokens import make_tokenizer
from tests.support.until import until
from tests.unit.api.running_app import MODEL, SECOND, number_of_the_chunk

TRANSCRIPTIONS = "/v1/audio/transcriptions"


@dataclass
class Running:
    server: run_module.Server
    replica: FakeReplica
    dispatcher: Dispatcher
    client: httpx.AsyncClient
    serving: asyncio.Task[None]

    def transcription(self) -> asyncio.Task[httpx.Response]:
        request = self.client.post(TRANSCRIPTIONS, files={"file": SECOND}, data=MODEL)
        return asyncio.create_task(request)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


@asynccontextmanager
async def serving_app(
    settings: ServerSettings, before_launch: Callable[[], Any] | None = None
) -> AsyncIterator[Running]:
    replica = FakeReplica(number_of_the_chunk)
    replica.before_launch = before_launch or replica.before_launch
    dispatcher = Dispatcher(settings, lambda _: replica, limits=ReplicaLimits(pause_s=0.01))
    pool = PreprocessPool(2)
    models = Models([ServedModel(settings, dispatcher, pool, make_tokenizer(), AudioWindow())])
    app = create_app(settings, models, pool)
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = run_module.Server(config, app.state.server)
    serving = asyncio.create_task(server.serve())
    await until(lambda: serving.done() or (server.started and (dispatcher.ready or before_launch)))
    try:
        async with httpx.AsyncClient(base_url=address_of(server), timeout=30) as client:
            yield Running(server, replica, dispatcher, client, serving)
    finally:
        server.should_exit = True
        await serving


def address_of(server: run_module.Server) -> str:
    listeners = [each for each in server.servers if each.sockets] if server.started else []
    return f"http://127.0.0.1:{listeners[0].sockets[0].getsockname()[1]}" if listeners else "http://nowhere"


# -- The start --


@pytest.mark.parametrize(
    ("values", "scheme", "warning"),
    [
        ({}, "http", None),
        ({"host": "0.0.0.0"}, "http", "no key is asked for on 0.0.0.0: anyone who can reach it"),
        ({"host": "0.0.0.0", "api_key": "a-key-that-nobody-guesses"}, "http", None),
        ({"ssl_certfile": "server.pem"}, "https", None),
    ],
)
async def test_the_address_is_announced_and_an_open_door_is_warned_of(
    values: dict[str, str],
    scheme: str,
    warning: str | None,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving_app(embedded(**values)) as app:
        port = app.client.base_url.port
        assert capsys.readouterr().out == f"listening on {scheme}://127.0.0.1:{port}\n"
        assert app.server.exit_status == STOPPED == 0
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each[: len(warning or "")] for each in warnings] == [warning] * bool(warning)
    assert all("--api-key" in each for each in warnings)


@pytest.mark.parametrize("key", ["", "a-key-that-nobody-guesses"])
async def test_wyomings_address_is_announced_and_closed_with_the_server(
    key: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_app(embedded(wyoming_port=0, api_key=key)):
        printed = io.StringIO()
        await until(lambda: printed.write(capsys.readouterr().out) and "wyoming" in printed.getvalue())
        _, line = printed.getvalue().splitlines()
        assert line.startswith("wyoming on tcp://127.0.0.1:")
        port = int(line.rpartition(":")[2])
        (await asyncio.open_connection("127.0.0.1", port))[1].close()
    assert (f"Wyoming has no authentication: anyone who can reach port {port}" in caplog.text) == bool(key)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_taken_wyoming_port_ends_the_server_with_a_status(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serving_app(embedded(wyoming_port=port)) as app:
            await app.serving
            await app.server.shutdown()
    assert app.server.exit_status == PORT_TAKEN == 3
    assert f"cannot listen for Wyoming on port {port}" in caplog.text


async def test_a_server_without_an_engine_ends_without_a_drain(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.server")

    async def impossible() -> None:
        raise StartImpossible("no such device")

    async with serving_app(embedded(), impossible) as app:
        await app.serving
    assert "draining" not in caplog.text


# -- The drain --


async def test_requests_finish_after_the_first_signal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.server")
    async with serving_app(embedded(drain_s=30)) as app:
        app.replica.holding = True
        request = app.transcription()
        await until(lambda: app.replica.held)
        app.signal()
        await until(lambda: "draining: 1 requests in flight have 30 s to finish" in caplog.text)
        assert (await app.client.get("/health")).status_code == 200
        refused = await app.client.post(TRANSCRIPTIONS, files={"file": SECOND}, data=MODEL)
        assert refused.status_code == 503
        app.replica.release(app.replica.held[0])
        assert (await request).json()["text"] == "zero"
        await app.serving
    assert caplog.messages[-1].startswith("drained in 0.")
    assert caplog.messages[-1].endswith(" s: no request is left")


@pytest.mark.parametrize(("drain_s", "num_signals"), [(0.05, 1), (3600.0, 2)])
async def test_at_the_limit_or_a_second_signal_what_is_left_is_refused(
    drain_s: float, num_signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_app(embedded(drain_s=drain_s)) as app:
        app.replica.holding = True
        request = app.transcription()
        await until(lambda: app.replica.held)
        for _ in range(num_signals):
            app.signal()
        assert (await request).json()["error"]["message"] == "The server is shutting down."
        await app.serving
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.startswith("drained for ")
    assert warning.endswith(" s: 1 requests unfinished")


@pytest.mark.parametrize("reuse_port", [True, False])
async def test_a_drain_on_a_shared_port_leaves_new_connections_to_the_others(reuse_port: bool) -> None:
    async with serving_app(embedded(reuse_port=reuse_port, drain_s=30)) as app:
        app.replica.holding = True
        request = app.transcription()
        await until(lambda: app.replica.held)
        port = app.client.base_url.port
        app.signal()
        await until(lambda: app.dispatcher.draining)
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
        except ConnectionRefusedError:
            assert reuse_port
        else:
            assert not reuse_port
        app.replica.release(app.replica.held[0])
        assert (await request).status_code == 200


# -- All of it, in a copy of this process --


def served(settings: ServerSettings, before: Callable[[], object] = lambda: None) -> Fork:
    def work(tell: Callable[[Any], None]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        configure_logging(settings.log_level)
        before()
        tell(run([settings]))

    return Fork(work)


def listening(process: Fork) -> str:
    line = process.line()
    assert line.startswith("listening on ")
    return line.removeprefix("listening on ")


LAZY: dict[str, Any] = {"port": 0, "load": "lazy"}
NEEDED = 2 * 500 + 256  # open files of a server for 500 connections


def limit_of_files(number: int) -> Callable[[], object]:
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, (number, number))


def test_a_server_says_little_of_itself_and_ends_in_order_at_a_signal() -> None:
    process = served(embedded(**LAZY, log_level="info", max_connections=500), limit_of_files(NEEDED))
    with httpx.Client(base_url=listening(process)) as client:
        reply = client.get("/health")
        assert reply.status_code == 200
        assert "server" not in reply.headers
        handshake = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        handshake |= {
            "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "sec-websocket-extensions": "permessage-deflate",
        }
        with client.stream("GET", "/v1/realtime?intent=transcription", headers=handshake) as switched:
            assert switched.status_code == 101
            assert "sec-websocket-extensions" not in switched.headers
    os.kill(process.pid, signal.SIGTERM)
    ended = process.end()
    assert (ended.status, ended.told) == (0, STOPPED)
    assert "drained in" in ended.errors
    assert "Traceback" not in ended.errors
    assert "open files" not in ended.errors


@pytest.mark.parametrize("module", [app_module, run_module])
def test_a_server_needs_none_of_the_packages_of_its_extras(module: ModuleType) -> None:
    def load(tell: Callable[[Any], None]) -> None:
        for name in (
            "opentelemetry",
            "wyoming",
            "asr_server.annexes.monitoring.traces",
            "asr_server.annexes.wyoming.server",
        ):
            vars(sys)["modules"][name] = None  # cannot be imported
        importlib.reload(module)
        tell("loaded")

    assert Fork(load).end().told == "loaded"


def test_too_few_open_files_are_warned_of_with_what_is_needed() -> None:
    process = served(embedded(**LAZY, max_connections=500), limit_of_files(NEEDED - 1))
    listening(process)
    os.kill(process.pid, signal.SIGTERM)
    ended = process.end()
    assert ended.told == STOPPED
    assert f"is {NEEDED - 1}, and --max-connections" in ended.errors
    assert f", 500, may need {NEEDED}: raise" in ended.errors


# -- Whole --

SERVE = (sys.executable, "-m", "asr_server", "serve", "--port", "0")


def test_the_decode_libraries_load_before_the_engine_so_that_no_upload_waits_for_them(server: Server) -> None:
    children = sorted(psutil.Process(server.process.pid).children(), key=psutil.Process.create_time)
    assert "asr_server.audio.ffmpeg_process" in children[0].cmdline()


@pytest.mark.slow
def test_an_engine_that_never_starts_ends_the_server_with_a_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('damaged')")  # the API process imports none
    ended = run_command(*SERVE, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == ENGINE_FAILED
    assert "the engine could not be started: replica 0 (pid " in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("ImportError: damaged") == MAX_FAILED_STARTS


@pytest.fixture(scope="module")
def public_server() -> Iterator[Server]:
    """Listens on every address, for more connections than the system allows open files."""
    host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    options = ("--host", host, "--wyoming-port", "0", "--max-connections", "40000")
    with run_server(*WITHOUT_ENGINE, *options) as server:
        yield server


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_the_address_of_all_takes_both_families_on_both_ports(public_server: Server) -> None:
    port = int(public_server.url.rpartition(":")[2])
    assert public_server.process.stdout is not None
    wyoming_port = int(public_server.process.stdout.readline().rpartition(":")[2])
    for host in ("127.0.0.1", "[::1]"):
        assert httpx.get(f"http://{host}:{port}/health").status_code == 200
    assert "no key is asked for on ::" in public_server.written()
    for host in ("127.0.0.1", "::1"):
        socket.create_connection((host, wyoming_port), timeout=60).close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "asr"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_collector_nothing_is_traced(environment: dict[str, str]) -> None:
    assert start_traces(environment) is None


def test_nothing_is_imported_for_traces_and_ray_that_nobody_asked_for() -> None:
    code = (
        "import asr_server.dispatch.executors, asr_server.server.run as run, sys; run.start_traces({});"
        "unwanted = {'asr_server.annexes.monitoring.traces', 'opentelemetry.sdk', 'ray'};"
        "sys.exit(bool(unwanted & sys.modules.keys()))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_traces_that_are_asked_for_and_cannot_be_sent_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert start_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}) is None
    (warning,) = caplog.messages
    assert warning.startswith("OTEL_EXPORTER_OTLP_ENDPOINT asks for traces, and none are sent: ")
    assert "pip install '.[traces]'" in warning


def test_ctrl_c_just_at_listening_leaves_no_traceback_of_a_child() -> None:
    """The terminal signals the whole group, while replica and decode process still load."""
    with subprocess.Popen(
        [*SERVE, "--model", str(EMBEDDED_MODEL)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on ")
        os.killpg(process.pid, signal.SIGINT)
        _, log = process.communicate(timeout=100)
    assert process.returncode == STOPPED
    assert "Traceback" not in log
