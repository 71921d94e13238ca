"""Memory shared by two processes: what is in use is never overwritten, and what is released is used again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from asr_server.channel import shared_memory
from asr_server.channel.messages import Credit, Submit
from asr_server.channel.shared_memory import (
    ALIGNMENT,
    KEPT_BYTES,
    SharedMemoryReader,
    SharedMemoryWriter,
)
from asr_server.channel.zeromq import ZmqEngineClient, ZmqEngineServer
from asr_server.core import ChunkId, DecodingOptions

MIB = 1 << 20


@pytest.fixture
def writer() -> Iterator[SharedMemoryWriter]:
    made = SharedMemoryWriter(64 * MIB)
    yield made
    made.close()


def read_floats(reader: SharedMemoryReader, offset: int) -> np.ndarray:
    return reader.read(offset).view(np.float32)


def test_what_is_written_is_read_without_a_copy(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.fd)
    offset = writer.write(np.arange(1000, dtype=np.float32)[::-1])
    assert offset is not None
    received = read_floats(reader, offset)
    np.testing.assert_array_equal(received, np.arange(1000, dtype=np.float32)[::-1])
    assert not received.flags.writeable


def test_a_view_keeps_its_array_in_use(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.fd)
    offset = writer.write(np.arange(1000, dtype=np.float32))
    assert offset is not None
    whole = read_floats(reader, offset)
    part = whole[10:20].reshape(2, 5)
    del whole
    assert reader.take_released() == []
    np.testing.assert_array_equal(part.ravel(), np.arange(10, 20))
    del part
    assert reader.take_released() == [offset]
    assert reader.take_released() == []


@pytest.mark.parametrize("kept_bytes", [KEPT_BYTES, 8 * MIB])
def test_random_writes_and_releases_never_overlap(
    kept_bytes: int, writer: SharedMemoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few bytes kept, pages go back to the system between arrays in use."""
    monkeypatch.setattr(shared_memory, "KEPT_BYTES", kept_bytes)
    choose = random.Random(1)
    reader = SharedMemoryReader(writer.fd)
    held: dict[int, tuple[np.ndarray, int]] = {}
    for number in range(600):
        if held and choose.random() < 0.45:
            offset = choose.choice(list(held))
            array, value = held.pop(offset)
            assert (array == value).all()
            del array
            assert reader.take_released() == [offset]
            writer.release(offset)
            continue
        written = writer.write(np.full(choose.randrange(100, 500_000), number, np.float32))
        if written is not None:
            held[written] = (read_floats(reader, written), number)
    assert all((array == value).all() for array, value in held.values())
    assert writer.num_bytes_used <= 64 * MIB
    for offset in list(held):
        del held[offset]
        writer.release(offset)
    assert writer.num_bytes_used == 0
    assert writer.write(np.zeros(60 * MIB, np.uint8)) == 0, "what was released is whole again"


def test_a_full_memory_says_so(writer: SharedMemoryWriter) -> None:
    assert writer.write(np.zeros(40 * MIB, np.uint8)) is not None
    assert writer.write(np.zeros(40 * MIB, np.uint8)) is None
    assert writer.write(np.zeros(20 * MIB, np.uint8)) is not None


def test_released_memory_goes_back_to_the_system() -> None:
    writer = SharedMemoryWriter(512 * MIB)
    offsets = [writer.write(np.ones(8 * MIB, np.uint8)) for _ in range(40)]
    assert os.fstat(writer.fd).st_blocks * 512 >= 320 * MIB
    for offset in offsets:
        assert offset is not None
        writer.release(offset)
    assert os.fstat(writer.fd).st_blocks * 512 <= KEPT_BYTES + 10 * MIB
    writer.close()


@pytest.mark.slow
def test_after_a_large_array_as_much_is_kept_as_ever() -> None:
    writer = SharedMemoryWriter(512 * MIB)
    for size in (300 * MIB, MIB):
        offset = writer.write(np.ones(size, np.uint8))
        assert offset is not None
        writer.release(offset)
        assert os.fstat(writer.fd).st_blocks * 512 == KEPT_BYTES
    writer.close()


def test_where_no_memory_is_left_an_array_finds_no_room(writer: SharedMemoryWriter) -> None:
    os.close(writer.fd)
    writer.fd = os.open("/dev/full", os.O_WRONLY)
    assert writer.write(np.ones(MIB, np.uint8)) is None
    assert writer.num_bytes_used == 0


@pytest.mark.parametrize("offset", [-ALIGNMENT, 1, 64 * MIB, 1 << 60])
def test_a_place_that_cannot_be_is_refused(writer: SharedMemoryWriter, offset: int) -> None:
    with pytest.raises(ValueError, match="no array at"):
        SharedMemoryReader(writer.fd).read(offset)


def test_a_place_in_use_or_a_length_beyond_the_end_is_refused(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.fd)
    offset = writer.write(np.ones(1000))
    assert offset is not None
    held = reader.read(offset)
    with pytest.raises(ValueError, match="no array at"):
        reader.read(offset)
    del held
    os.pwrite(writer.fd, b"\xff" * 8, offset)
    with pytest.raises(ValueError, match="longer than the memory"):
        reader.read(offset)


async def test_samples_cross_in_shared_memory_and_are_released_when_dropped() -> None:
    client = ZmqEngineClient()
    assert client.shared is not None
    server = ZmqEngineServer(replace(client.address, shared_fd=os.dup(client.shared.fd)))
    server.send(Credit(1))
    assert await client.receive() == Credit(1)
    samples = np.linspace(-1, 1, 480_000, dtype=np.float32)
    client.send(Submit(ChunkId("a", 0), samples, DecodingOptions()))
    assert client.shared.num_bytes_used >= samples.nbytes
    (command,) = server.receive(wait_s=5.0)
    assert isinstance(command, Submit)
    server.receive(wait_s=0.0)
    server.send(Credit(2))
    assert await client.receive() == Credit(2)
    client.send(Submit(ChunkId("b", 0), -samples, DecodingOptions()))
    np.testing.assert_array_equal(command.samples, samples)  # no other chunk is written over one that waits
    del command
    server.receive(wait_s=5.0)
    server.receive(wait_s=0.0)
    server.send(Credit(3))
    assert await client.receive() == Credit(3)
    assert client.shared.num_bytes_used == 0
    server.close()
    client.close()


def test_memory_that_is_closed_is_gone_though_something_still_refers_to_its_writer() -> None:
    writer = SharedMemoryWriter(MIB)
    assert "asr-server-arrays" in Path("/proc/self/maps").read_text()
    writer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer.fd)
    assert "asr-server-arrays" not in Path("/proc/self/maps").read_text()


async def test_what_finds_no_room_goes_along_with_its_message() -> None:
    client = ZmqEngineClient()
    assert client.shared is not None
    client.shared.close()
    client.shared = SharedMemoryWriter(MIB)
    server = ZmqEngineServer(replace(client.address, shared_fd=os.dup(client.shared.fd)))
    server.send(Credit(1))
    await client.receive()
    samples = np.linspace(-1, 1, 480_000, dtype=np.float32)
    client.send(Submit(ChunkId("a", 0), samples, DecodingOptions()))
    (command,) = server.receive(wait_s=5.0)
    assert isinstance(command, Submit)
    np.testing.assert_array_equal(command.samples, samples)
    assert client.shared.num_bytes_used == 0
    server.close()
    client.close()


@pytest.mark.slow
def test_nothing_is_left_when_the_writing_process_is_killed() -> None:
    code = (
        "import sys, time, numpy as np\n"
        "from asr_server.channel.shared_memory import SharedMemoryWriter\n"
        "writer = SharedMemoryWriter(1 << 29)\n"
        "writer.write(np.ones(1 << 28, np.uint8))\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    held = [path.stat().st_blocks * 512 for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert max(held) > 200 * MIB
    before = psutil.virtual_memory().shared
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while before - psutil.virtual_memory().shared < 150 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.05)
