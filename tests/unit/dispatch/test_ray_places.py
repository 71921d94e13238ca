"""How many replicas a Ray cluster gets and what each asks of it: on a stand-in for Ray, which is slow."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server import __version__
from asr_server.annexes.ray import executor as module
from asr_server.annexes.ray.actor import ReplicaActor
from asr_server.annexes.ray.executor import RayExecutor
from asr_server.channel.zeromq import ReplicaSpec
from asr_server.dispatch.supervisor import ReplicaGone, StartImpossible
from tests.support.embedded import embedded


class StandIn:
    """Ray with these hosts and GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_hosts: int = 2, gpus: float = 0) -> None:
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}
        self.removed: list[Any] = []
        self.lines: list[tuple[bytes, str]] = []
        self.began, self.end = Future[None](), Future[None]()
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=lambda resources, strategy: (tuple(resources[0].items()), strategy, object()),
            remove_placement_group=self.removed.append,
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

    def kill(self, actor: Any) -> None:
        self.calls.append("kill")

    def remote(self, **options: Any) -> Any:
        self.options["actor"] = options

        def of(actor_class: Any) -> Any:
            assert actor_class is ReplicaActor
            return SimpleNamespace(remote=lambda: self.actor)

        return of

    @property
    def actor(self) -> Any:
        def run(line: bytes, version: str) -> Any:
            self.lines.append((line, version))
            return SimpleNamespace(future=lambda: self.end)

        def options(name: str) -> Any:
            self.options["name"] = name
            return SimpleNamespace(remote=run)

        begun = SimpleNamespace(future=lambda: self.began)
        return SimpleNamespace(
            run=SimpleNamespace(options=options), __ray_ready__=SimpleNamespace(remote=lambda: begun)
        )


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


async def started(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[StandIn, RayExecutor]:
    stand_in = StandIn(monkeypatch)
    executor = RayExecutor(embedded(executor="ray", replicas=3, **settings))
    await executor.start()
    return stand_in, executor


async def test_an_actor_is_started_in_its_place_and_sent_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    stand_in, executor = await started(monkeypatch, api_key="s3cret", cpu_threads=2)
    stand_in.began.set_result(None)
    replica = await executor.launch(1)
    options = stand_in.options["actor"]
    assert (options["num_cpus"], options["num_gpus"], options["max_restarts"]) == (2, 0, 0)
    assert options["scheduling_strategy"].placement_group is executor._places[1]
    assert stand_in.options["name"] == "asr-server replica 1"
    ((line, version),) = stand_in.lines
    spec = ReplicaSpec.from_line(line)
    assert (spec.index, spec.num_on_device, version) == (1, 2, __version__)
    assert (spec.settings.api_key, spec.settings.model) == ("", "whisper-digits")
    assert "check 10.0.0.9:6379" in stand_in.calls
    assert replica.name == "replica 1"
    stand_in.end.set_exception(RuntimeError("the actor\n died"))
    with pytest.raises(ReplicaGone, match=r"^replica 1 has ended: the actor died$"):
        await replica.receive()
    await replica.close()
    assert stand_in.calls[-1] == "kill"


async def test_a_place_is_waited_for_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(module, "PLACE_WAIT_S", 0.25)
    monkeypatch.setattr(module, "PLACE_LOG_S", 0.5)
    stand_in, executor = await started(monkeypatch)
    launching = asyncio.create_task(executor.launch(2))
    while stand_in.calls.count("check 10.0.0.9:6379") < 4:
        await asyncio.sleep(0.01)
    stand_in.began.set_result(None)
    replica = await launching
    line = "replica 2 waits for a place in the Ray cluster: it needs {'CPU': 1}"
    assert caplog.messages == [line]
    stand_in.end.set_result(None)
    with pytest.raises(ReplicaGone, match=r"^replica 2 has ended$"):
        await replica.receive()
    await replica.close()


async def test_leaving_gives_the_places_back_and_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    stand_in, executor = await started(monkeypatch)
    may_end = threading.Event()
    call = threading.Thread(target=may_end.wait, args=(60,), name=module.CALL_THREAD)
    call.start()
    leaving = asyncio.create_task(executor.stop())
    await asyncio.sleep(0.02)
    assert (stand_in.removed, leaving.done()) == ([], False), "it waits for calls that are under way"
    may_end.set()
    await leaving
    call.join()
    assert stand_in.removed == executor._places
    assert stand_in.calls[-2:] == ["shutdown", "cluster closed"]


async def test_a_cluster_that_is_gone_does_not_hold_up_a_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")
    stand_in, executor = await started(monkeypatch)

    def refuse(address: str) -> None:
        raise OSError("cannot connect")

    unregistered: list[object] = []
    monkeypatch.setattr(module, "check_answers", refuse)
    monkeypatch.setattr(module, "atexit", SimpleNamespace(unregister=unregistered.append))
    await executor.stop()
    assert unregistered == [stand_in.shutdown]
    assert caplog.messages == ["the Ray cluster could not be left in order: OSError: cannot connect"]
    assert stand_in.calls[-1] == "cluster closed"
    assert "shutdown" not in stand_in.calls
