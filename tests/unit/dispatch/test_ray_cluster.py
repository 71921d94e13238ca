"""Which Ray cluster is joined or started, what is checked of it first, and the places of its replicas."""

import asyncio
import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server.annexes.ray import cluster as module
from asr_server.annexes.ray import executor as executor_module
from asr_server.annexes.ray.cluster import address_to_join, check_answers, cluster_address, local_cluster
from asr_server.annexes.ray.executor import RayExecutor
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import StartImpossible
from tests.support.embedded import embedded

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
def test_another_port_is_refused(answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    reason = r"^no Ray cluster could be started on this machine: .*Not a directory"
    with pytest.raises(OSError, match=reason), local_cluster():
        pass
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
async def test_a_cluster_that_another_user_has_named_is_not_joined(left_by_ray_start: Path) -> None:
    os.chown(left_by_ray_start, 65534, 65534)
    settings = embedded(executor="ray", ray_address="auto")
    dispatcher = Dispatcher(settings, lambda _: RayExecutor(settings))
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


def test_an_address_in_brackets_is_ipv6s() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot connect to \[::1\]:{port}: ") as raised:
            check_answers(f"[::1]:{port}")
    assert raised.value.errno in (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class StandIn:
    """Ray with these hosts and GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_hosts: int = 2, gpus: float = 0) -> None:
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=lambda resources, strategy: (tuple(resources[0].items()), strategy, object()),
        )
        self._nodes = [{"Alive": True}] * num_hosts + [{"Alive": False}]
        self._gpus = {"GPU": gpus} if gpus else {}
        monkeypatch.setattr(executor_module, "_ray", lambda: self)
        monkeypatch.setattr(
            executor_module, "check_answers", lambda address: self.calls.append(f"check {address}")
        )
        monkeypatch.setattr(executor_module, "cluster_address", self._cluster)

    @contextmanager
    def _cluster(self, address: str) -> Any:
        yield "10.0.0.9:6379"
        self.calls.append("cluster closed")

    def init(self, **options: Any) -> None:
        self.options["init"] = options

    def nodes(self) -> list[dict[str, bool]]:
        return self._nodes

    def cluster_resources(self) -> dict[str, float]:
        return self._gpus

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.mark.parametrize(
    ("hosts", "gpus", "settings", "expected"),
    [
        (2, 0, {"cpu_threads": 3}, (2, {"CPU": 3}, 1)),
        (2, 0, {}, (2, {"CPU": 1}, 1)),
        (2, 0, {"replicas": 3, "cpu_threads": 2}, (3, {"CPU": 2}, 2)),
        (2, 0, {"replicas": 4}, (4, {"CPU": 1}, 2)),
        (2, 0, {"tensor_parallel_size": 2, "cpu_threads": 3}, (2, {"CPU": 6}, 1)),
        (3, 5, {}, (5, {"GPU": 1.0}, 1)),
        (3, 5, {"device": "cpu"}, (3, {"CPU": 1}, 1)),
        (3, 4, {"replicas": 8}, (8, {"GPU": 0.5}, 2)),
        (3, 5, {"tensor_parallel_size": 2}, (2, {"GPU": 2.0}, 1)),
        (1, 0, {"device": "cuda", "replicas": 2}, (2, {"GPU": 1.0}, 1)),
    ],
)
async def test_each_replica_gets_a_place_with_its_part(
    hosts: int,
    gpus: float,
    settings: dict[str, Any],
    expected: tuple[int, dict[str, float], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn(monkeypatch, hosts, gpus)
    executor = RayExecutor(embedded(executor="ray", **settings))
    assert await executor.start() == expected[0]
    assert executor._resources == expected[1]
    assert executor._num_on_device == expected[2]
    assert [place[:2] for place in executor._places] == [(tuple(expected[1].items()), "SPREAD")] * expected[0]
    assert stand_in.options["init"] == {
        "address": "10.0.0.9:6379",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    assert executor._settings.replicas == -(-expected[0] // hosts), "that share a host's cores"


async def test_a_cluster_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, 1, gpus=1)
    executor = RayExecutor(embedded(executor="ray", tensor_parallel_size=2))
    with pytest.raises(StartImpossible, match=r"^each replica needs 2 GPUs: the Ray cluster has 1$"):
        await executor.start()


async def test_why_a_cluster_is_not_joined_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch)

    def fail(**_: Any) -> None:
        raise ConnectionError("no\n  head node")

    monkeypatch.setattr(stand_in, "init", fail)
    executor = RayExecutor(embedded(executor="ray", ray_address="10.0.0.9:6379"))
    reason = "^no Ray cluster at 10.0.0.9:6379: ConnectionError: no head node$"
    with pytest.raises(StartImpossible, match=reason):
        await executor.start()
    await executor.stop()
    assert stand_in.calls[-1] == "cluster closed"
