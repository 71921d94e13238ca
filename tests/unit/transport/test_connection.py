"""The ends for processes of one host (ipc) and of several (tcp), both ends in one process."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from msgspec.structs import replace

from asr_server.annexes.ray.tcp import TcpEngineClient, TcpEngineServer
from asr_server.core import ChunkId, DecodingOptions
from asr_server.transport import wire
from asr_server.transport.messages import Cancel, Command, Credit, Event, Heartbeat, Submit
from asr_server.transport.zeromq import (
    MAX_EVENTS,
    Address,
    CurveKeys,
    ReplicaSpec,
    ZmqEngineClient,
    ZmqEngineServer,
)
from tests.support.embedded import embedded
from tests.support.until import until

Ends = tuple[ZmqEngineClient, ZmqEngineServer]
CHUNK = np.linspace(-1, 1, 480_000, dtype=np.float32)


def make_ends(transport: str) -> Ends:
    if transport == "ipc":
        client = ZmqEngineClient()
        assert client.shared is not None
        return client, ZmqEngineServer(replace(client.address, shared_fd=os.dup(client.shared.fd)))
    client = TcpEngineClient("127.0.0.1")
    return client, TcpEngineServer(client.address, on_lost=lambda: None)


@pytest.fixture(params=["ipc", "tcp"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    client, server = make_ends(request.param)
    yield client, server
    server.close()
    client.close()


@pytest.fixture
async def client() -> AsyncIterator[ZmqEngineClient]:
    client = ZmqEngineClient()
    yield client
    client.close()


def free_slots(client: ZmqEngineClient) -> int:
    assert client.shared is not None
    return len(client.shared._free)


async def next_events(client: ZmqEngineClient) -> list[Event]:
    while not (events := client.receive_now()):
        await client.wait()
    return events


async def connected(client: ZmqEngineClient, server: ZmqEngineServer) -> None:
    server.send(Credit(1))
    assert await next_events(client) == [Credit(1)]


async def received(server: ZmqEngineServer, count: int) -> list[Command]:
    commands: list[Command] = []
    while len(commands) < count:
        commands += await asyncio.to_thread(server.receive, 5.0)
    return commands


async def test_commands_arrive_in_order_and_whole(ends: Ends) -> None:
    client, server = ends
    await connected(client, server)
    client.send(Submit(ChunkId("a", 0), CHUNK, DecodingOptions()))
    client.send(Cancel("a"))
    submit, cancel = await received(server, 2)
    assert isinstance(submit, Submit)
    np.testing.assert_array_equal(submit.samples, CHUNK)
    assert cancel == Cancel("a")
    assert server.receive(wait_s=0.0) == []


async def test_events_are_sent_from_any_thread_and_received_together(ends: Ends) -> None:
    client, server = ends
    await connected(client, server)
    events = [Heartbeat(number) for number in range(MAX_EVENTS + 3)]

    def send_all() -> None:
        for event in events:
            server.send(event)

    thread = threading.Thread(target=send_all)
    thread.start()
    thread.join()
    found: list[Event] = []
    while len(found) < len(events):
        some = await next_events(client)
        assert len(some) <= MAX_EVENTS, "the event loop has other work too"
        found += some
    assert found == events


async def test_a_sender_holds_no_more_than_what_it_sent(ends: Ends) -> None:
    """64 chunks of 2 MB to a replica that reads and drops them: nothing of them stays with the sender."""
    client, server = ends
    await connected(client, server)
    process = psutil.Process()
    before = process.memory_info().rss
    for number in range(64):
        client.send(Submit(ChunkId("a", number), CHUNK, DecodingOptions()))
        assert server.receive(wait_s=5.0)
        server.receive(wait_s=0.0)  # reports that the samples have been dropped
        server.send(Credit(1))
        await next_events(client)
    assert process.memory_info().rss - before < 16 * CHUNK.nbytes


async def test_samples_use_shared_memory_until_the_replica_drops_them() -> None:
    client, server = make_ends("ipc")
    await connected(client, server)
    before = free_slots(client)
    client.send(Submit(ChunkId("a", 0), CHUNK, DecodingOptions()))
    commands = server.receive(wait_s=60.0)  # in this thread: others keep a result for a moment
    assert len(commands) == 1
    assert free_slots(client) == before - 1
    commands.clear()
    gc.collect()
    server.receive(wait_s=0.0)
    server.send(Credit(1))
    assert await next_events(client) == [Credit(1)], "what is released is no event"
    assert free_slots(client) == before
    server.close()
    client.close()


async def test_a_command_to_nobody_is_refused_and_takes_no_memory(client: ZmqEngineClient) -> None:
    before = free_slots(client)
    with pytest.raises(zmq.Again):
        client.send(Submit(ChunkId("a", 0), CHUNK, DecodingOptions()))
    assert free_slots(client) == before


@pytest.fixture
def sockets(client: ZmqEngineClient) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A replica's sockets, of which the one for events has connected."""
    context = zmq.Context()
    events, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    events.connect(client.address.events)
    yield events, commands
    context.destroy(linger=0)


async def test_an_event_is_given_out_once_commands_can_go_and_then_no_name_is_left(
    client: ZmqEngineClient, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    events, commands = sockets
    folder = Path(client.address.events.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o077 == 0
    events.send_multipart(wire.encode(Credit(1)))
    receiving = asyncio.create_task(next_events(client))
    assert not (await asyncio.wait([receiving], timeout=0.2))[0]
    assert folder.is_dir()
    commands.connect(client.address.commands)
    assert await receiving == [Credit(1)]
    client.send(Cancel("a"))
    assert not folder.exists()


async def test_an_event_whose_replica_died_before_its_other_socket_came_is_still_given_out(
    client: ZmqEngineClient,
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asr_server.transport.zeromq.CONNECT_LIMIT_MS", 50)
    sockets[0].send_multipart(wire.encode(Credit(1)))
    assert await next_events(client) == [Credit(1)]


async def test_closing_leaves_no_file_no_socket_and_no_thread() -> None:
    process = psutil.Process()
    before = (process.num_fds(), process.num_threads(), len(asyncio.all_tasks()))
    for transport in ("ipc", "tcp"):
        client, server = make_ends(transport)
        folder = Path(client.address.events.removeprefix("ipc://")).parent
        server.close()
        client.close()
        assert not folder.exists()
    await until(lambda: process.num_fds() <= before[0] and process.num_threads() <= before[1])
    await until(lambda: len(asyncio.all_tasks()) == before[2])


async def test_without_free_handles_there_is_an_error_and_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_server.transport.zeromq.FILE_HANDLES", 1 << 20)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Too many open files"):
        ZmqEngineClient()
    assert psutil.Process().num_fds() == before


async def test_an_end_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().num_fds()
    for folder in (tmp_path / "gone", tmp_path / ("x" * 120)):
        if len(folder.name) > 100:
            folder.mkdir()  # a socket's path has 107 characters
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(OSError, match=r"No such file|longer than 107"):
            ZmqEngineClient()
    assert psutil.Process().num_fds() == before
    assert [path for path in tmp_path.rglob("*") if path.parent != tmp_path] == []


def test_a_replica_is_given_all_in_a_line_that_keeps_its_secret_out_of_logs() -> None:
    keys = CurveKeys("public", "the secret", "peer")
    spec = ReplicaSpec(3, Address("tcp://a:1", "tcp://a:2", keys=keys), embedded().core, 2)
    line = spec.to_line()
    assert line.count(b"\n") == 1
    assert ReplicaSpec.from_line(line) == spec
    assert "the secret" not in repr(spec)
