"""What a server has made ready before the first request, and how it ends when it cannot start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from asr_server.dispatch.supervisor import MAX_FAILED_STARTS
from asr_server.server.run import ENGINE_FAILED, start_traces
from tests.conftest import WITHOUT_ENGINE, Server, run_server

SERVE = (sys.executable, "-m", "asr_server", "serve", "--port", "0")


def test_the_decode_libraries_load_before_the_engine_so_that_no_upload_waits_for_them(server: Server) -> None:
    children = sorted(psutil.Process(server.process.pid).children(), key=psutil.Process.create_time)
    assert "asr_server.audio.ffmpeg_process" in children[0].cmdline()


@pytest.mark.slow
def test_an_engine_that_never_starts_ends_the_server_with_a_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('damaged')")  # the API process imports none
    ended = subprocess.run(
        SERVE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
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


@pytest.mark.slow
def test_a_limit_of_open_files_below_what_connections_need_is_warned_of_at_the_start(
    public_server: Server,
) -> None:
    (warning,) = [line for line in public_server.lines() if "open files" in line]
    assert "ulimit -n" in warning
    assert "--max-connections" in warning


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


def test_a_server_without_a_collector_imports_nothing_for_it() -> None:
    code = (
        "import asr_server.server.run as run, sys; run.start_traces({});"
        "sys.exit('asr_server.api.traces' in sys.modules or 'opentelemetry.sdk' in sys.modules)"
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
