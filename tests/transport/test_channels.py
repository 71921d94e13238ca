import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from asr_server.core import Cancel, ChunkId, Credit, DecodingOptions, Heartbeat, Submit
from asr_server.transport import wire
from asr_server.transport.channels import InlineChannel, InlinePort, ZmqChannel, ZmqPort


@pytest.fixture
def ends() -> Iterator[tuple[ZmqPort, ZmqChannel]]:
    port = ZmqPort()
    channel = ZmqChannel(port.address)
    yield port, channel
    channel.close()
    port.close()


async def connected(port: ZmqPort, channel: ZmqChannel) -> None:
    channel.send(Credit(1))
    assert await port.receive() == Credit(1)


async def test_commands_arrive_in_order_and_whole(ends: tuple[ZmqPort, ZmqChannel]) -> None:
    port, channel = ends
    await connected(port, channel)
    samples = np.linspace(-1, 1, 480_000, dtype=np.float32)
    port.send(Submit(ChunkId("a", 0), samples, DecodingOptions()))
    port.send(Cancel("a"))
    submit, cancel = channel.receive(wait_s=5.0) + channel.receive(wait_s=0.2)
    assert isinstance(submit, Submit)
    np.testing.assert_array_equal(submit.samples, samples)
    assert cancel == Cancel("a")


async def test_an_event_is_given_out_only_once_commands_can_go() -> None:
    port, context = ZmqPort(), zmq.Context()
    events, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    events.connect(port.address + "events")
    events.send_multipart(wire.events.encode(Credit(1)))
    receiving = asyncio.create_task(port.receive())
    assert not (await asyncio.wait([receiving], timeout=0.2))[0]
    commands.connect(port.address + "commands")
    assert await receiving == Credit(1)
    port.send(Cancel("a"))
    events.close(linger=0)
    commands.close(linger=0)
    context.term()
    port.close()


async def test_receiving_without_a_command_returns_after_the_wait(ends: tuple[ZmqPort, ZmqChannel]) -> None:
    assert ends[1].receive(wait_s=0.0) == []


async def test_the_heart_speaks_from_a_thread_of_its_own(ends: tuple[ZmqPort, ZmqChannel]) -> None:
    port, channel = ends
    heart = channel.heart()

    def beat_once() -> None:
        heart.beat(Heartbeat(5))
        heart.close()

    thread = threading.Thread(target=beat_once)
    thread.start()
    thread.join()
    assert await port.receive() == Heartbeat(5)


async def test_sending_to_nobody_says_so() -> None:
    port = ZmqPort()
    with pytest.raises(zmq.Again):
        port.send(Cancel("a"))
    port.close()


async def test_closing_leaves_no_socket_file_behind() -> None:
    port = ZmqPort()
    folder = Path(port.address.removeprefix("ipc://"))
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0
    port.close()
    assert not folder.exists()


async def test_a_sender_holds_no_more_than_what_it_sent(ends: tuple[ZmqPort, ZmqChannel]) -> None:
    """64 chunks of 2 MB to a replica that reads them: nothing of them stays with the sender."""
    port, channel = ends
    await connected(port, channel)
    samples = np.zeros(480_000, np.float32)
    process = psutil.Process()
    before = process.memory_info().rss
    for chunk in range(64):
        port.send(Submit(ChunkId("a", chunk), samples, DecodingOptions()))
        assert channel.receive(wait_s=5.0)
    assert process.memory_info().rss - before < 16 * samples.nbytes


async def test_inline_ends_pass_objects_between_thread_and_loop() -> None:
    port = InlinePort()
    channel = InlineChannel(port)
    port.send(Cancel("a"))
    port.send(Cancel("b"))
    assert channel.receive(wait_s=1.0) == [Cancel("a"), Cancel("b")]
    await asyncio.to_thread(channel.send, Credit(2))
    assert await port.receive() == Credit(2)
