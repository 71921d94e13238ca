"""What the ends of one host hold, queue, release and leave behind."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from asr_server.channel import wire
from asr_server.channel.messages import Cancel, Command, Credit, Drain, Event, Heartbeat, Released, Submit
from asr_server.channel.zeromq import Address, CurveKeys, ReplicaSpec, ZmqEngineClient, ZmqEngineServer
from asr_server.core import ChunkId, DecodingOptions
from tests.embedded import embedded

MANY = 3000  # more than ZeroMQ queues by itself, and than a Unix socket holds


class Ends:
    def __init__(self) -> None:
        self.client = ZmqEngineClient()
        assert self.client.shared is not None
        self.shared_fd = os.dup(self.client.shared.fd)
        self.server = ZmqEngineServer(replace(self.client.address, shared_fd=self.shared_fd))

    @property
    def folder(self) -> Path:
        return Path(self.client.address.events.removeprefix("ipc://")).parent

    async def connect(self) -> None:
        self.server.send(Credit(1))
        assert await self.client.receive() == Credit(1)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    made.server.close()
    made.client.close()


async def test_any_number_of_commands_waits_for_a_replica_that_computes(ends: Ends) -> None:
    await ends.connect()
    for number in range(MANY):
        ends.client.send(Cancel(str(number)))
    received: list[Command] = []
    while len(received) < MANY:
        received += ends.server.receive(wait_s=5.0)
    assert received == [Cancel(str(number)) for number in range(MANY)]


async def test_any_number_of_events_waits_for_a_server_that_is_busy(ends: Ends) -> None:
    await ends.connect()
    for number in range(MANY):
        ends.server.send(Credit(number))
    assert [await ends.client.receive() for _ in range(MANY)] == [Credit(number) for number in range(MANY)]


async def test_commands_and_events_have_no_limit_and_heartbeats_one_minute(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = ends.server, ends.client
    assert server._events.getsockopt(zmq.SNDHWM) == server._commands.getsockopt(zmq.RCVHWM) == 0
    assert client._events.getsockopt(zmq.RCVHWM) == client._commands.getsockopt(zmq.SNDHWM) == 0
    made: list[int | bytes] = []
    connect = server._connect

    def noted(*how: Any) -> zmq.Socket[bytes]:
        socket = connect(*how)
        made.append(socket.getsockopt(zmq.SNDHWM))
        return socket

    monkeypatch.setattr(server, "_connect", noted)
    with server.heartbeats():
        assert made == [60]


async def test_events_that_are_here_are_given_out_without_waiting(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    assert ends.client.receive_now() is None  # nothing has come, so that commands could go nowhere
    await ends.connect()
    assert ends.client.receive_now() is None
    ends.server.send(Credit(2))
    ends.server._events.send_multipart([b"\xc1"])  # no event
    ends.server.send(Credit(3))
    events: list[Event] = []
    async with asyncio.timeout(60):
        while len(events) < 2:
            events += [event] if (event := ends.client.receive_now()) else []
            await asyncio.sleep(0)
    assert events == [Credit(2), Credit(3)]
    assert [line.partition(":")[0] for line in caplog.messages] == ["a message that is no event was dropped"]


async def test_a_message_that_is_no_command_is_dropped_with_a_line(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    await ends.connect()
    ends.client._commands.send_multipart([b"\xc1"])
    ends.client.send(Drain())
    received: list[Command] = []
    while not received:
        received += ends.server.receive(wait_s=5.0)
    assert received == [Drain()]
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "a message that is no command was dropped"
    ]


async def test_both_ends_leave_no_context() -> None:
    made = Ends()
    await made.connect()
    made.server.close()
    made.client.close()
    assert made.server._context.closed
    assert made.client._context.closed


async def test_events_before_the_first_one_was_taken_wait_for_the_connection(ends: Ends) -> None:
    ends.server.send(Credit(1))
    await asyncio.sleep(0.01)
    assert ends.client.receive_now() is None
    assert await ends.client.receive() == Credit(1)


async def test_the_wait_for_a_command_is_in_seconds(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(zmq.Socket, "poll", lambda socket, timeout: waited.append(timeout))
    assert [ends.server.receive(wait_s) for wait_s in (0.0, 0.5, 2.0)] == [[], [], []]
    assert waited == [0, 500, 2000]


async def test_the_names_of_sockets_are_gone_once_all_three_are_connected(ends: Ends) -> None:
    await ends.connect()
    assert ends.folder.is_dir()
    with ends.server.heartbeats() as send:
        send(Heartbeat(1))
        assert await ends.client.receive() == Heartbeat(1)
    assert not ends.folder.exists()
    ends.server.send(Credit(2))
    assert await ends.client.receive() == Credit(2)
    ends.client.send(Drain())
    assert ends.server.receive(wait_s=5.0) == [Drain()]


async def test_heartbeats_alone_leave_the_names_for_the_sockets_that_are_to_come(ends: Ends) -> None:
    with ends.server.heartbeats() as send:
        for number in range(3):
            send(Heartbeat(number))
            assert await ends.client.receive() == Heartbeat(number)
    assert ends.folder.is_dir()


async def test_samples_that_were_dropped_are_told_with_the_next_wait(ends: Ends) -> None:
    await ends.connect()
    assert ends.client.shared is not None
    ends.client.send(Submit(ChunkId("a", 0), np.ones(10_000, np.float32), DecodingOptions()))
    commands = ends.server.receive(wait_s=5.0)
    held = ends.client.shared.num_bytes_used
    assert held > 40_000
    ends.server.receive(wait_s=0.0)
    ends.server.send(Credit(2))
    assert await ends.client.receive() == Credit(2)
    assert ends.client.shared.num_bytes_used == held
    del commands
    ends.server.receive(wait_s=0.0)
    ends.server.send(Credit(3))
    assert await ends.client.receive() == Credit(3)  # and not what told of it
    assert ends.client.shared.num_bytes_used == 0


async def test_what_tells_of_memory_that_is_not_shared_is_no_event(ends: Ends) -> None:
    await ends.connect()
    assert ends.client.shared is not None
    ends.client.shared.close()
    ends.client.shared = None
    ends.server.send(Released((0,)))
    ends.server.send(Credit(2))
    assert await ends.client.receive() == Credit(2)


async def test_the_replica_closes_the_handle_that_it_inherited(ends: Ends) -> None:
    """What is left: the client's own, and one of the mapping at each end."""
    assert ends.client.shared is not None
    memory = os.fstat(ends.client.shared.fd).st_ino
    assert len([number for number in open_handles() if os.fstat(number).st_ino == memory]) == 3


def open_handles() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()]


async def test_a_replica_without_shared_memory_gets_samples_with_the_command() -> None:
    client = ZmqEngineClient()
    assert client.shared is not None
    client.shared.close()
    client.shared = None
    server = ZmqEngineServer(replace(client.address, shared_fd=None))
    server.send(Credit(1))
    await client.receive()
    client.send(Submit(ChunkId("a", 0), np.arange(1000, dtype=np.float32), DecodingOptions()))
    (command,) = server.receive(wait_s=5.0)
    assert isinstance(command, Submit)
    np.testing.assert_array_equal(command.samples, np.arange(1000))
    server.close()
    client.close()


async def test_an_end_that_cannot_listen_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)  # longer than the name of a Unix socket may be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="is longer than") as caught:
        ZmqEngineClient()
    assert caught.value.errno == errno.ENAMETOOLONG
    assert list(deep.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_open


async def test_an_end_that_finds_no_folder_leaves_no_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    num_open = len(open_handles())
    with pytest.raises(FileNotFoundError):
        ZmqEngineClient()
    assert len(open_handles()) == num_open


async def test_without_free_handles_there_is_an_error_in_place_of_an_abort() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(limits[0]) if number not in in_use][:9]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ZmqEngineClient()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_client_that_closes_takes_its_memory_with_it() -> None:
    client = ZmqEngineClient()
    assert client.shared is not None
    fd = client.shared.fd
    client.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_an_event_whose_replica_died_before_its_other_socket_came_is_still_given_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asr_server.channel.zeromq.CONNECT_LIMIT_MS", 1)
    client, context = ZmqEngineClient(), zmq.Context()
    events = context.socket(zmq.PUSH)
    events.connect(client.address.events)
    events.send_multipart(wire.events.encode(Credit(1)))
    assert await client.receive() == Credit(1)
    with pytest.raises(zmq.Again):
        client.send(Drain())
    context.destroy(linger=0)
    client.close()


def test_a_replica_is_told_all_in_a_line_that_keeps_its_secret_out_of_logs() -> None:
    keys = CurveKeys("a" * 40, "secret" * 7, "b" * 40)
    spec = ReplicaSpec(3, Address("tcp://x:1", "tcp://x:2", keys=keys), embedded(max_slots=3))
    line = spec.to_line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert ReplicaSpec.from_line(line) == spec
    assert (spec.num_on_device, spec.cores, spec.computes_on_cpu) == (1, (), False)
    assert "secret" not in repr(spec)
    full = msgspec.structs.replace(spec, num_on_device=2, cores=(0, 1), computes_on_cpu=True)
    assert ReplicaSpec.from_line(full.to_line()) == full
