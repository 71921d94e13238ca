"""Memory that a writer fills and a reader uses in place; messages with their arrays, to frames and back."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr_server.core import ChunkId, DecodingOptions
from asr_server.transport import wire
from asr_server.transport.messages import Command, Submit
from asr_server.transport.wire import SLOT_BYTES, SharedMemoryReader, SharedMemoryWriter, create_shared_memory


@pytest.fixture
def writer() -> Iterator[SharedMemoryWriter]:
    writer = SharedMemoryWriter(4)
    yield writer
    writer.close()


def filled(value: int, length: int = 5000) -> np.ndarray:
    return np.full(length, value, np.uint8)


def test_a_view_keeps_its_slot_in_use_and_nothing_else_does(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.fd)
    slot = writer.write(filled(7))
    assert slot is not None
    array = reader.read(slot, 5000).view("<u2")[10:]
    assert not array.flags.writeable
    gc.collect()
    assert reader.take_released() == []
    assert set(array) == {0x0707}
    del array
    gc.collect()
    assert reader.take_released() == [slot]
    assert reader.take_released() == []


@given(steps=st.lists(st.integers(0, 9), max_size=60))
def test_writes_never_overlap_what_is_in_use(steps: list[int]) -> None:
    writer = SharedMemoryWriter(4)
    reader = SharedMemoryReader(writer.fd)
    in_use: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step < 6:
            slot = writer.write(filled(number, 1 + 1000 * step))
            assert (slot is None) == (len(in_use) == 4)
            if slot is not None:
                assert slot == min(set(range(4)) - in_use.keys()), "the lowest: few pages are touched"
                in_use[slot] = number
        elif in_use:
            released = sorted(in_use)[step % len(in_use)]
            writer.release(released)
            del in_use[released]
        for slot, value in in_use.items():
            assert reader.read(slot, 1)[0] == value
    writer.close()


def test_what_is_longer_than_a_slot_finds_no_room(writer: SharedMemoryWriter) -> None:
    assert writer.write(filled(0, SLOT_BYTES)) == 0
    assert writer.write(filled(0, SLOT_BYTES + 1)) is None
    assert writer.write(filled(0)) == 1


def test_where_no_memory_is_left_an_array_finds_no_room(
    writer: SharedMemoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says so to a write; a mapping would end the process."""

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        assert writer.write(filled(1)) is None
    assert writer.write(filled(1)) == 0


def test_a_system_without_shared_memory_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert create_shared_memory() is None
    assert "no memory can be shared with replicas" in caplog.text


def test_nothing_is_left_when_the_writing_process_is_killed() -> None:
    code = (
        "import numpy as np; from asr_server.transport.wire import *\n"
        "writer = SharedMemoryWriter(64)\n"
        "[writer.write(np.ones(SLOT_BYTES, np.uint8)) for _ in range(64)]; print(1, flush=True); input()"
    )
    before = psutil.virtual_memory().shared
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    assert psutil.virtual_memory().shared - before < 64 * SLOT_BYTES


def submit(samples: np.ndarray) -> Submit:
    options = DecodingOptions(language="de", temperatures=(0.0, 0.2))
    return Submit(ChunkId("request", 3, 1, 2), samples, options)


def test_a_large_array_rides_in_a_frame_of_its_own_and_a_small_one_inside_the_message() -> None:
    header, samples = wire.encode(submit(np.arange(16_000, dtype=np.float32)))
    assert len(header) < 300
    assert memoryview(samples).nbytes == 64_000
    assert len(wire.encode(submit(np.zeros(63, np.float32)))) == 1
    assert len(wire.encode(submit(np.zeros(64, np.float32)))) == 2


@pytest.mark.parametrize("length", [0, 1, 63, 64, 480_000])
def test_every_message_comes_back_as_it_was(length: int) -> None:
    message = submit(np.random.default_rng(length).standard_normal(length).astype(np.float32))
    received = wire.decode([bytes(frame) for frame in wire.encode(message)], Command)
    assert isinstance(received, Submit)
    assert (received.id, received.options) == (message.id, message.options)
    np.testing.assert_array_equal(received.samples, message.samples)


def test_reading_and_writing_copy_nothing() -> None:
    samples = np.zeros(1000, np.float32)
    received = wire.decode(wire.encode(submit(samples)), Command)
    assert np.shares_memory(received.samples, samples)


def test_a_large_array_lies_in_shared_memory_where_there_is_room() -> None:
    writer = SharedMemoryWriter(1)
    reader = SharedMemoryReader(writer.fd)
    message = submit(np.arange(10_000, dtype=np.float32))
    too_long = submit(np.zeros(SLOT_BYTES // 4 + 1, np.float32))
    for sent, num_frames in ((too_long, 2), (message, 1), (message, 2)):  # the last one finds no room
        frames = wire.encode(sent, writer)
        assert len(frames) == num_frames
        np.testing.assert_array_equal(wire.decode(frames, Command, reader).samples, sent.samples)
    writer.close()


def crossed(value: Any) -> Any:
    return wire.decode(wire.encode({"value": value}), dict)["value"]


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", "<i8", "<f2", "<f4", "<f8", "<c8", ">i2"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (7,), (33, 5), (2, 3, 40)])
def test_arrays_of_any_type_and_shape_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    for sent in (array, array[::-2] if array.ndim else array):
        received = crossed(sent)
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(received, sent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (60, 70)])
def test_tensors_of_any_type_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    for sent in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
        received = crossed(sent)
        assert received.dtype == dtype
        assert torch.equal(received, sent)


def test_arrays_stand_beside_plain_values_however_deep() -> None:
    received = crossed([1, 2.5, {"a": np.arange(100), "b": [np.float32(1.5), "text", None, b"raw"]}])
    np.testing.assert_array_equal(received[2].pop("a"), np.arange(100))
    assert received == [1, 2.5, {"b": [1.5, "text", None, b"raw"]}]
