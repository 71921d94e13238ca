"""How many replicas a Ray cluster gets and what each asks of it: on a stand-in for Ray, which is slow."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server.annexes.ray import executor as module
from asr_server.annexes.ray.executor import RayExecutor
from asr_server.dispatch.supervisor import StartImpossible
from tests.support.embedded import embedded


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
        monkeypatch.setattr(module, "_ray", lambda: self)
        monkeypatch.setattr(module, "check_answers", lambda address: self.calls.append(f"check {address}"))
        monkeypatch.setattr(module, "cluster_address", self._cluster)

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
        (2, 0, {"replicas_per_device": 2}, (4, {"CPU": 1}, 2)),
        (2, 0, {"tensor_parallel_size": 2, "cpu_threads": 3}, (2, {"CPU": 6}, 1)),
        (3, 5, {}, (5, {"GPU": 1.0}, 1)),
        (3, 5, {"device": "cpu"}, (3, {"CPU": 1}, 1)),
        (3, 4, {"replicas_per_device": 2}, (8, {"GPU": 0.5}, 2)),
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
