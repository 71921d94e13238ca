"""What a replica's process is given, its GPU and cores, and how its events and its end are noticed."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable
from typing import Any

import psutil
import pytest
import zmq

from asr_server.channel.messages import Cancel, Command, Credit, Drain, Event
from asr_server.channel.zeromq import ZmqEngineClient
from asr_server.dispatch import processes
from asr_server.dispatch.processes import MAX_EVENTS, MultiprocessExecutor, RemoteReplica
from asr_server.dispatch.supervisor import ReplicaGone
from asr_server.machine import cores_of
from tests.embedded import embedded

DESCRIPTORS_OF_A_CLIENT = 10  # at least


async def test_no_key_is_in_the_arguments_or_the_environment_of_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    replica = await MultiprocessExecutor(embedded(api_key="s3cret")).launch(0)
    process = psutil.Process(replica.pid)
    shown = process.cmdline() + list(process.environ().values())
    await replica.close()
    assert not [text for text in shown if "s3cret" in text]
    assert not [text for text in shown if '"device"' in text]


@pytest.mark.parametrize("num_rounds", range(4))
async def test_a_replica_that_is_closed_just_as_it_ends_keeps_no_descriptor(num_rounds: int) -> None:
    replica = await MultiprocessExecutor(embedded()).launch(0)
    process = psutil.Process()
    before = process.num_fds()
    replica._process.kill()
    while replica._process.returncode is None:
        await asyncio.sleep(0)
    for _ in range(num_rounds):  # of the loop; in one of them it has ended and nobody was told
        await asyncio.sleep(0)
    await replica.close()
    assert process.num_fds() < before - DESCRIPTORS_OF_A_CLIENT


class ReplicaOf(RemoteReplica):
    def _exit_message(self) -> str:
        return "ended"

    async def close(self, drain_s: float = 0.0) -> None:
        pass


class ClientWith(ZmqEngineClient):
    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._come = iter(events)

        self.sent: list[Command] = []
        self.is_connected = True

    def receive_now(self) -> Event | None:
        return next(self._come, None)

    async def receive(self) -> Event:
        while (event := self.receive_now()) is None:
            await asyncio.sleep(0.001)
        return event

    def send(self, command: Command) -> None:
        if not self.is_connected:
            raise zmq.Again
        self.sent.append(command)


async def test_events_that_have_come_together_are_received_together_and_in_order() -> None:
    come: list[Event] = [Credit(count) for count in range(MAX_EVENTS + 3)]
    replica = ReplicaOf("replica 0", ClientWith(come), asyncio.get_running_loop().create_future())
    assert await replica.receive() == come[:MAX_EVENTS]
    assert await replica.receive() == come[MAX_EVENTS:]


async def test_the_first_event_is_waited_for_and_those_behind_it_come_along() -> None:
    come: list[Any] = [None, None, Credit(1), Credit(2), Credit(3), None, Credit(4)]
    replica = ReplicaOf("replica 0", ClientWith(come), asyncio.get_running_loop().create_future())
    assert await replica.receive() == [Credit(1), Credit(2), Credit(3)]
    assert await replica.receive() == [Credit(4)]


async def test_a_replica_that_has_ended_sends_its_last_events_first() -> None:
    end = asyncio.get_running_loop().create_future()
    end.set_result(0)
    replica = ReplicaOf("replica 0", ClientWith([Credit(1)]), end)
    assert await replica.receive() == [Credit(1)]
    with pytest.raises(ReplicaGone, match=r"^ended$"):
        await replica.receive()
    with pytest.raises(ReplicaGone, match=r"^ended$"):
        replica.send(Cancel("a"))


async def test_what_cannot_be_sent_now_never_waits() -> None:
    client = ClientWith()
    replica = ReplicaOf("replica 0", client, asyncio.get_running_loop().create_future())
    replica.send(Cancel("a"))
    assert client.sent == [Cancel("a")]
    client.is_connected = False
    with pytest.raises(ReplicaGone, match="replica 0 is not connected"):
        replica.send(Cancel("b"))


@pytest.mark.parametrize(
    ("limit_s", "has_ended", "sent"), [(0.01, False, 1), (0.0, False, 0), (9.0, True, 0)]
)
async def test_a_replica_that_runs_is_asked_to_drain(limit_s: float, has_ended: bool, sent: int) -> None:
    client, end = ClientWith(), asyncio.get_running_loop().create_future()
    if has_ended:
        end.set_result(0)
    await ReplicaOf("replica 0", client, end)._drain(limit_s)
    assert client.sent == [Drain()] * sent
    client.is_connected = False
    await ReplicaOf("replica 0", client, end)._drain(0.01)


class Placed(MultiprocessExecutor):
    """Its processes print what they are given, and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: list[str], **settings: Any) -> None:
        monkeypatch.setattr(processes, "visible_gpus", lambda: gpus)
        super().__init__(embedded(**settings))


def test_gpus_are_dealt_out_to_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = Placed(monkeypatch, ["4", "5", "6"], device="cuda", replicas=5)
    devices = [placed.device_of(index)["CUDA_VISIBLE_DEVICES"] for index in range(5)]
    assert devices == ["4", "5", "6", "4", "5"]
    assert [placed.num_on_device(index) for index in range(5)] == [2, 2, 1, 2, 2]


def test_the_ranks_of_a_replica_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = Placed(monkeypatch, ["0", "1", "2", "3", "4"], device="cuda", replicas=2, tensor_parallel_size=2)
    devices = [placed.device_of(index)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert devices == ["0,1", "2,3"]
    assert [placed.num_on_device(index) for index in range(2)] == [1, 1]


def test_on_a_cpu_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for placed in (Placed(monkeypatch, ["0"], device="cpu", replicas=3), Placed(monkeypatch, [], replicas=3)):
        assert placed.device_of(1) == {}
        assert placed.num_on_device(1) == 3


@pytest.mark.parametrize(
    ("gpus", "replicas", "pin_cores", "pinned"),
    [
        ([], 2, "auto", False),
        (["0"], 1, "auto", False),
        (["0"], 2, "auto", True),
        (["0", "1"], 2, "auto", False),
        ([], 2, "on", True),
        (["0"], 2, "off", False),
    ],
)
def test_replicas_that_share_a_gpu_are_pinned_to_cores(
    gpus: list[str], replicas: int, pin_cores: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Placed(monkeypatch, gpus, device="auto", replicas=replicas, pin_cores=pin_cores)
    assert placed.cores_of(1) == (cores_of(1, replicas) if pinned else ())


async def test_a_process_that_cannot_be_started_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process()
    executor = MultiprocessExecutor(embedded())
    before = process.num_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        await executor.launch(0)
    assert process.num_fds() == before


class Printed(MultiprocessExecutor):
    module = "tests.dispatch.printing_replica"


async def test_a_replicas_process_ends_with_its_status_and_its_input_is_closed() -> None:
    executor = Printed(embedded(replicas=2, cpu_threads=3, api_key="s3cret", admin_key="s3cret"))
    assert await executor.start() == 2
    replica = await executor.launch(1)
    assert replica.name == "replica 1"
    assert replica.pid == replica._process.pid
    assert await replica._end == 7
    with pytest.raises(ReplicaGone, match=rf"replica 1 \(pid {replica.pid}\) exited with status 7"):
        replica.send(Cancel("a"))
    await replica.close()
    await executor.stop()
    assert replica._process.stdin is not None
    assert replica._process.stdin.is_closing()


async def test_a_process_that_cannot_be_killed_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a call of a device's driver."""
    monkeypatch.setattr(processes, "KILL_LIMIT_S", 0.01)
    replica = await MultiprocessExecutor(embedded()).launch(0)
    kill = replica._process.kill
    monkeypatch.setattr(replica._process, "kill", lambda: None)
    with caplog.at_level(logging.ERROR):
        await replica.close()
    assert caplog.messages == [f"replica 0 (pid {replica.pid}) does not end although it was killed"]
    kill()
    await replica._end
