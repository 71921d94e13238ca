"""The server's start, warnings, drain and exit status, in front of a replica or in a copy of this process."""

from __future__ import annotations

import asyncio
import importlib
import io
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn

import tests.wyoming.wyoming_client  # noqa: F401  before a test imports the package, which warns
from asr_server.api.models import ModelRegistry
from asr_server.api.served_model import ServedModel
from asr_server.api.state import RealtimeSessions
from asr_server.audio.pool import PreprocessPool
from asr_server.checkpoint.files import AudioWindow
from asr_server.config import EMBEDDED_MODEL, Settings
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits, StartImpossible
from asr_server.server import app as app_module
from asr_server.server import run as run_module
from asr_server.server.app import create_app
from asr_server.server.run import ENGINE_FAILED, PORT_TAKEN, STOPPED, Server, run
from asr_server.telemetry import configure_logging
from tests.api.running_app import MODEL, SECOND, number_of_the_chunk, until
from tests.embedded import embedded
from tests.fake_replica import FakeReplica
from tests.forked import Fork
from tests.vocabulary import make_tokenizer

TRANSCRIPTIONS = "/v1/audio/transcriptions"


@dataclass
class Running:
    server: Server
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
    settings: Settings, before_launch: Callable[[], Any] | None = None
) -> AsyncIterator[Running]:
    replica = FakeReplica(number_of_the_chunk)
    replica.before_launch = before_launch or replica.before_launch
    dispatcher, pool = Dispatcher(settings, replica, limits=ReplicaLimits(pause_s=0.01)), PreprocessPool(2)
    models = ModelRegistry([ServedModel(settings, dispatcher, pool, make_tokenizer(), AudioWindow())])
    app = create_app(settings, models, pool)
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = Server(config, app.state.server)
    serving = asyncio.create_task(server.serve())
    await until(lambda: serving.done() or (server.started and (dispatcher.ready or before_launch)))
    try:
        async with httpx.AsyncClient(base_url=address_of(server), timeout=30) as client:
            yield Running(server, replica, dispatcher, client, serving)
    finally:
        server.should_exit = True
        await serving


def address_of(server: Server) -> str:
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


async def test_a_port_of_wyoming_that_is_taken_ends_the_server_with_a_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serving_app(embedded(wyoming_port=port)) as app:
            await app.serving
            await app.server.shutdown()
    assert app.server.exit_status == PORT_TAKEN == 3
    assert f"cannot listen for Wyoming on port {port}" in caplog.text


async def test_a_server_whose_engine_cannot_start_ends_without_a_drain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.server")

    async def impossible() -> None:
        raise StartImpossible("no such device")

    async with serving_app(embedded(), impossible) as app:
        await app.serving
    assert "draining" not in caplog.text


# -- The drain --


async def test_the_first_signal_lets_requests_finish_while_probes_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


class Session:
    """Leaves when it has been asked to so many times."""

    def __init__(self, leaves_at: int) -> None:
        self.left = asyncio.Event()
        self._asked_for = leaves_at

    def end(self, code: int, reason: str) -> None:
        self._asked_for -= 1
        if self._asked_for == 0:
            self.left.set()

    async def stay_in(self, sessions: RealtimeSessions) -> None:
        with sessions.enter(self):
            await self.left.wait()


def sessions_of(app: Running) -> RealtimeSessions:
    sessions: RealtimeSessions = app.server.config.app.state.server.realtime  # type: ignore[union-attr]
    return sessions


async def test_a_request_and_a_session_in_flight_are_two(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.server")
    async with serving_app(embedded(drain_s=0.05)) as app:
        app.replica.holding = True
        request = app.transcription()
        await until(lambda: app.replica.held)
        with sessions_of(app).enter(Session(99)):
            app.signal()
            await app.serving
        assert (await request).status_code == 503
    assert "draining: 2 requests in flight have 0.05 s to finish" in caplog.text
    assert caplog.messages[-1].endswith(" s: 2 requests unfinished")


async def test_a_session_that_is_left_at_the_limit_is_asked_to_end_once_more_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_left: list[int] = []
    shutdown = uvicorn.Server.shutdown

    async def noted(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        num_left.append(sessions_of(app).num_active)
        await shutdown(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "shutdown", noted)
    async with serving_app(embedded(drain_s=0.05)) as app:
        session = Session(leaves_at=2)
        staying = asyncio.create_task(session.stay_in(sessions_of(app)))
        await until(lambda: sessions_of(app).num_active)
        app.signal()
        await app.serving
        session.left.set()
        await staying
    assert num_left == [0]


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


async def test_a_signal_keeps_the_ends_of_replicas_out_of_the_log() -> None:
    async with serving_app(embedded()) as app:
        told: list[bool] = []
        app.dispatcher.supervisor.expect_ends = lambda: told.append(True)  # type: ignore[method-assign]
        app.signal()
        assert told == [True]


@pytest.mark.parametrize("reuse_port", [True, False])
async def test_a_server_that_shares_its_port_leaves_new_connections_to_the_others_while_it_drains(
    reuse_port: bool,
) -> None:
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


def served(settings: Settings, before: Callable[[], object] = lambda: None) -> Fork:
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
        for name in ("opentelemetry", "wyoming", "asr_server.api.traces", "asr_server.wyoming"):
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


def test_the_last_spans_are_sent_when_the_server_has_ended() -> None:
    class Kept:
        def close(self) -> None:
            logging.getLogger("traces").warning("the spans are sent")

    def keep() -> None:
        vars(run_module)["start_traces"] = lambda environment: Kept()

    process = served(embedded(**LAZY, log_level="info"), keep)
    listening(process)
    os.kill(process.pid, signal.SIGTERM)
    assert "the spans are sent" in process.end().errors.splitlines()[-1]


def test_an_engine_that_cannot_start_is_the_exit_status_and_the_last_line(tmp_path: Path) -> None:
    model = tmp_path / "damaged"
    shutil.copytree(EMBEDDED_MODEL, model)
    (model / "model.safetensors").write_bytes(b"no weights")
    ended = served(embedded(model=str(model), port=0, executor="inline", device="cpu")).end()
    assert ended.told == ENGINE_FAILED == 1
    assert "the engine could not be started: " in ended.errors.splitlines()[-1]


@pytest.mark.parametrize("reuse_port", [True, False])
def test_the_servers_sockets_are_shared_where_it_was_asked_for(reuse_port: bool) -> None:
    for listener in run_module._sockets(embedded(reuse_port=reuse_port, port=0, host="0.0.0.0")) or ():
        with listener:
            assert bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)) == reuse_port


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://y:4318"),
    ],
)
def test_either_variable_of_a_collector_asks_for_traces(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from asr_server.api.traces import Traces

    made = object()
    monkeypatch.setattr(Traces, "to_collector", lambda: made)
    for further, is_on in (
        ({}, True),
        ({"OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_SDK_DISABLED": "no"}, True),
    ):
        assert (run_module.start_traces({variable: value} | further) is made) == is_on
