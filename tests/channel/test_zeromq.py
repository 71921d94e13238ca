"""The ends for processes of one host (ipc) and of several (tcp), both ends in one process."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from msgspec.structs import replace

from asr_server.channel import wire
from asr_server.channel.messages import Cancel, Command, Credit, Heartbeat, Submit
from asr_server.channel.tcp import TcpEngineClient, TcpEngineServer
from asr_server.channel.zeromq import ZmqEngineClient, ZmqEngineServer
from asr_server.core import ChunkId, DecodingOptions

Ends = tuple[ZmqEngineClient, ZmqEngineServer]


def make_ends(channel: str) -> Ends:
    if channel == "ipc":
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


async def connected(client: ZmqEngineClient, server: ZmqEngineServer) -> None:
    server.send(Credit(1))
    assert await client.receive() == Credit(1)


async def test_commands_arrive_in_order_and_whole(ends: Ends) -> None:
    client, server = ends
    await connected(client, server)
    samples = np.linspace(-1, 1, 480_000, dtype=np.float32)
    client.send(Submit(ChunkId("a", 0), samples, DecodingOptions()))
    client.send(Cancel("a"))
    received: list[Command] = []
    while len(received) < 2:
        received += server.receive(wait_s=5.0)
    submit, cancel = received
    assert isinstance(submit, Submit)
    np.testing.assert_array_equal(submit.samples, samples)
    assert cancel == Cancel("a")


async def test_an_event_is_given_out_only_once_commands_can_go() -> None:
    client, context = ZmqEngineClient(), zmq.Context()
    events, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    events.connect(client.address.events)
    events.send_multipart(wire.events.encode(Credit(1)))
    receiving = asyncio.create_task(client.receive())
    assert not (await asyncio.wait([receiving], timeout=0.2))[0]
    commands.connect(client.address.commands)
    assert await receiving == Credit(1)
    client.send(Cancel("a"))
    events.close(linger=0)
    commands.close(linger=0)
    context.term()
    client.close()


async def test_receiving_without_a_command_returns_after_the_wait(
    ends: Ends,
) -> None:
    assert ends[1].receive(wait_s=0.0) == []


async def test_heartbeats_are_sent_from_a_thread_of_their_own(
    ends: Ends,
) -> None:
    client, server = ends

    def beat_once() -> None:
        with server.heartbeats() as send:
            send(Heartbeat(5))

    thread = threading.Thread(target=beat_once)
    thread.start()
    thread.join()
    assert await client.receive() == Heartbeat(5)


async def test_sending_to_nobody_says_so() -> None:
    client = ZmqEngineClient()
    with pytest.raises(zmq.Again):
        client.send(Cancel("a"))
    client.close()


async def test_closing_leaves_no_socket_file_behind() -> None:
    client = ZmqEngineClient()
    folder = Path(client.address.events.removeprefix("ipc://")).parent
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0
    client.close()
    assert not folder.exists()


async def test_a_sender_holds_no_more_than_what_it_sent(
    ends: Ends,
) -> None:
    """64 chunks of 2 MB to a replica that reads and drops them: nothing of them stays with the sender."""
    client, server = ends
    await connected(client, server)
    samples = np.zeros(480_000, np.float32)
    process = psutil.Process()
    before = process.memory_info().rss
    for chunk in range(64):
        client.send(Submit(ChunkId("a", chunk), samples, DecodingOptions()))
        assert server.receive(wait_s=5.0)
        server.receive(wait_s=0.0)  # says that the samples have been dropped
        server.send(Credit(1))
        await client.receive()
    assert process.memory_info().rss - before < 16 * samples.nbytes


async def test_what_is_no_message_is_dropped_and_the_next_one_arrives(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    client, server = ends
    await connected(client, server)
    whole = wire.commands.encode(Submit(ChunkId("a", 0), np.zeros(100, np.float32), DecodingOptions()))
    nonsense: list[list[Any]] = [
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode({"type": "Nonsense"})],
        [msgspec.msgpack.encode({"type": "Cancel"})],
        [whole[0]],  # the frame of its samples is missing
        [whole[0], b"123"],
    ]
    for frames in nonsense:
        client._commands.send_multipart(frames)
        server._events.send_multipart(frames)
    client.send(Cancel("a"))
    server.send(Credit(2))
    received: list[Command] = []
    while not received:
        received = await asyncio.to_thread(server.receive, 5.0)
    assert received == [Cancel("a")]
    assert await client.receive() == Credit(2)
    assert caplog.text.count("is no command was dropped") == len(nonsense)
    assert caplog.text.count("is no event was dropped") == len(nonsense)
