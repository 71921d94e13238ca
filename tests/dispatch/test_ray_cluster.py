"""Which Ray cluster is joined, what is checked of it beforehand, and the cluster of this machine alone."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server.dispatch import ray_cluster as module
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.ray_cluster import LocalCluster, address_to_join, check_answers, cluster_address
from tests.embedded import embedded
from tests.forked import Fork, run_as_main

GREETING = bytes(3) + b"\x04" + bytes(5)  # an empty frame of HTTP/2's settings


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Answer one connection; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError), listening.accept()[0] as connection:
                connection.sendall(answer)
                connection.recv(1)
                is_over.wait(30)

        is_over = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        is_over.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is not Ray"), (b"", "timed out")],
)
def test_a_port_that_is_not_rays_is_refused(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.ANSWER_LIMIT_S < 20
    monkeypatch.setattr(module, "ANSWER_LIMIT_S", 0.2)
    with listener(answer) as address:
        with pytest.raises(OSError, match=f"cannot connect to {address}: {reason}") as raised:
            check_answers(address)
        assert raised.value.errno == 0


@pytest.fixture
def left_by_ray_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file in which `ray start` leaves the address of a cluster; something listens there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(module, "_CURRENT_CLUSTER", path)
    with listener(GREETING) as address:
        path.write_text(f"{address}\n")
        yield path


def test_the_cluster_that_this_user_has_begun_here_is_joined(left_by_ray_start: Path) -> None:
    with cluster_address("auto") as address:
        assert address == left_by_ray_start.read_text().strip()


@pytest.mark.slow
def test_a_cluster_of_its_own_that_does_not_start_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null/nowhere")
    with pytest.raises(OSError, match=r"^no Ray cluster could be started on this machine: .*Not a directory"):
        LocalCluster()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
async def test_a_cluster_that_another_user_has_named_is_not_joined(left_by_ray_start: Path) -> None:
    os.chown(left_by_ray_start, 65534, 65534)
    dispatcher = Dispatcher(embedded(executor="ray", ray_address="auto"))
    await dispatcher.start()
    async with asyncio.timeout(60):
        while not dispatcher.supervisor.given_up:
            await asyncio.sleep(0.02)
    assert f"{left_by_ray_start} is another user's" in dispatcher.supervisor.last_failure
    await dispatcher.stop()


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        ("local", "10.0.0.1:6379", ""),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "", ""),
    ],
)
def test_the_address_is_that_of_the_setting_or_of_rays_variable(
    setting: str, environment: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setattr(module, "_CURRENT_CLUSTER", tmp_path / "none")
    assert address_to_join(setting) == expected


def test_the_address_that_ray_start_left_is_cut_at_its_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ray_current_cluster"
    path.write_text("a" * 400)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module, "_CURRENT_CLUSTER", path)
    assert address_to_join("auto") == "a" * 300


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_cluster_that_root_or_this_user_has_begun_is_joined_and_no_others(
    owner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ray_current_cluster"
    path.write_text("10.0.0.3:6379\n")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module, "_CURRENT_CLUSTER", path)
    stat = os.stat_result([0] * 4 + [owner] + [0] * 5)
    monkeypatch.setattr(os, "fstat", lambda _: stat)
    monkeypatch.setattr(os, "geteuid", lambda: 2)
    if owner == 1:
        with pytest.raises(OSError, match=r"another user's: name the cluster, or local, by --ray-address"):
            address_to_join("auto")
    else:
        assert address_to_join("auto") == "10.0.0.3:6379"


def test_a_cluster_that_does_not_answer_is_not_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(ConnectionRefusedError), cluster_address(f"127.0.0.1:{port}"):
        raise AssertionError


def test_an_answer_of_grpc_is_enough_and_the_question_is_http2s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard: list[bytes] = []

        def serve() -> None:
            with listening.accept()[0] as connection:
                heard.append(connection.recv(100))
                connection.sendall(GREETING)

        thread = threading.Thread(target=serve)
        thread.start()
        check_answers(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert heard == [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"]


def test_with_tls_a_connection_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        check_answers(address)


def test_an_address_without_a_port_is_left_to_ray() -> None:
    for address in ("ray://host:10001/path", "somewhere", "host:port"):
        check_answers(address)


def test_an_address_in_brackets_is_ipv6s() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot connect to \[::1\]:{port}: ") as raised:
            check_answers(f"[::1]:{port}")
    assert raised.value.errno in (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


# -- Of this machine alone ------------------------------------------------------------------------------


class Started:
    """A cluster's process that prints these lines and goes on as long as its input is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lines: str, at_end: str = "") -> None:
        code = f"import sys; print({chr(10).join(lines)!r}, flush=True); sys.stdin.read(); {at_end}"
        self.processes: list[subprocess.Popen[str]] = []
        self.options: dict[str, Any] = {}
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
            assert command == [sys.executable, "-m", "asr_server.dispatch.ray_cluster"]
            self.options = options
            self.processes.append(popen([sys.executable, "-c", code], **options))
            return self.processes[-1]

        monkeypatch.setattr(subprocess, "Popen", start)


def test_its_address_is_read_and_it_ends_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, "a warning", "the cluster's address: 127.0.0.1:1234", "more")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    for name in module.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with cluster_address("local") as address:
        assert address == "127.0.0.1:1234"
        assert {name: os.environ[name] for name in module.ENVIRONMENT} == module.ENVIRONMENT
        (process,) = started.processes
        assert process.poll() is None
    assert process.returncode == 0
    assert process.stdout is not None
    assert process.stdout.closed
    assert started.options["start_new_session"] is True
    environment = started.options["env"]
    assert module.ENVIRONMENT.items() <= environment.items()
    assert "VLLM_API_KEY" not in environment


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_LIMIT_S", 0.05)
    started = Started(monkeypatch, "the cluster's address: a", at_end="import time; time.sleep(300)")
    LocalCluster().stop()
    assert started.processes[0].returncode == -9


@pytest.mark.parametrize(
    ("line", "reason"),
    [("nothing of use", "its process ended"), ("the cluster did not start: no memory", "no memory")],
)
def test_why_one_does_not_start_is_said(line: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, command = subprocess.Popen, [sys.executable, "-c", f"print({line!r})"]
    started: list[subprocess.Popen[str]] = []

    def start(_: object, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match=f"^no Ray cluster could be started on this machine: {reason}$"):
        LocalCluster()
    assert [process.returncode for process in started] == [0]


def test_a_signal_is_the_servers_business_while_its_process_starts_ray_and_afterwards(tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.mkdir()

    def work(tell: Callable[[Any], None]) -> None:
        assert not Path("/proc/self/cmdline").read_bytes().startswith(b"asr-server ray cluster")

        def init(**options: Any) -> SimpleNamespace:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                signal.signal(number, signal.SIG_DFL)
            title = Path("/proc/self/cmdline").read_bytes().strip(b"\0").decode()
            tell(options | {"title": title})
            return SimpleNamespace(address_info={"address": "127.0.0.1:4321", "session_dir": str(session)})

        sys.modules["ray"] = SimpleNamespace(init=init, shutdown=session.joinpath("ended").touch)  # type: ignore[assignment]
        run_as_main(module.__name__)

    process = Fork(work)
    assert process.line() == "the cluster's address: 127.0.0.1:4321"
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    process.give_no_more()
    ended = process.end()
    assert (ended.status, ended.errors) == (0, "")
    assert not session.exists()
    assert ended.told == {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "title": "asr-server ray cluster",
    }


@pytest.mark.parametrize("starts", [True, False])
def test_why_ray_does_not_start_is_a_line_and_a_session_that_it_has_removed_itself_is_none(
    starts: bool,
) -> None:
    def work(tell: Callable[[Any], None]) -> None:
        def init(**options: Any) -> SimpleNamespace:
            if starts:
                return SimpleNamespace(address_info={"address": "a:1", "session_dir": "/nowhere/session"})
            raise RuntimeError("no room\n for it")

        sys.modules["ray"] = SimpleNamespace(init=init, shutdown=lambda: None)  # type: ignore[assignment]
        try:
            run_as_main(module.__name__)
        except SystemExit as ended:
            tell(ended.code)

    process = Fork(work)
    process.give_no_more()
    ended = process.end()
    line = b"the cluster's address: a:1\n" if starts else b"the cluster did not start: no room for it\n"
    assert (ended.output, ended.told, ended.errors) == (line, None if starts else 1, "")


@pytest.mark.slow
def test_its_process_starts_ray_for_this_machine_and_ends_it_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Ray, which takes seconds to start; `test_executors.py` has the real one."""
    session = tmp_path / "session"
    session.mkdir()
    (tmp_path / "ray.py").write_text(STAND_IN.format(session=str(session)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(Path(__file__).parents[2])
    cluster = LocalCluster()
    assert cluster.address == "127.0.0.1:4321"
    os.kill(cluster._process.pid, 15)
    os.kill(cluster._process.pid, 2)
    assert cluster._process.poll() is None, "stopping is the server's business"
    cluster.stop()
    assert cluster._process.returncode == 0
    assert not session.exists()
    assert (tmp_path / "shut down").exists()
    (tmp_path / "fails").touch()
    with pytest.raises(OSError, match=r"on this machine: no room for it$"):
        LocalCluster()


STAND_IN = """
import logging, pathlib, signal, types
here = pathlib.Path(__file__).parent

def init(**options):
    assert options == dict(address="local", include_dashboard=False, object_store_memory=80 << 20,
                           log_to_driver=False, logging_level=logging.ERROR), options
    if (here / "fails").exists():
        raise RuntimeError("no room\\n for it")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return types.SimpleNamespace(address_info=dict(address="127.0.0.1:4321", session_dir="{session}"))

def shutdown():
    (here / "shut down").touch()
"""
