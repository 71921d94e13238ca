"""Where arrays lie in shared memory, to the byte, and what no array can be read as."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asr_server.channel import shared_memory as module
from asr_server.channel.shared_memory import (
    SharedMemoryReader,
    SharedMemoryWriter,
    as_bytes,
    create_shared_memory,
    from_bytes,
    is_array,
    type_name,
)

PAGE, HEADER = 4096, 64


@pytest.fixture
def writer() -> Iterator[SharedMemoryWriter]:
    made = SharedMemoryWriter(16 * PAGE)
    yield made
    made.close()


def write(writer: SharedMemoryWriter, num_bytes: int, value: int = 1) -> int | None:
    return writer.write(np.full(num_bytes, value, np.uint8))


def test_an_array_takes_whole_pages_with_its_header(writer: SharedMemoryWriter) -> None:
    offsets = [
        write(writer, PAGE - HEADER),
        write(writer, PAGE - HEADER + 1),
        write(writer, 0),
        write(writer, 1),
    ]
    assert offsets == [0, PAGE, 3 * PAGE, 4 * PAGE]
    assert writer.num_bytes_used == 5 * PAGE


def test_the_lowest_gap_that_is_large_enough_is_used_again(writer: SharedMemoryWriter) -> None:
    one, two, three = (PAGE * count - HEADER for count in (1, 2, 3))
    assert [write(writer, size) for size in (one, two, one, three, one)] == [
        *(0, PAGE, 3 * PAGE, 4 * PAGE, 7 * PAGE),
    ]
    writer.release(PAGE)
    writer.release(4 * PAGE)
    assert write(writer, three) == 4 * PAGE
    assert write(writer, two) == PAGE
    writer.release(0)
    writer.release(PAGE)
    assert write(writer, three) == 0


def test_a_memory_is_filled_to_its_last_byte_and_no_further(writer: SharedMemoryWriter) -> None:
    assert write(writer, 16 * PAGE - HEADER + 1) is None
    assert write(writer, 16 * PAGE - HEADER, 7) == 0
    assert write(writer, 1) is None
    content = SharedMemoryReader(writer.fd).read(0)
    assert (len(content), set(content.tolist())) == (16 * PAGE - HEADER, {7})
    writer.release(0)
    writer.release(0)  # nothing is there any more
    assert writer.num_bytes_used == 0


@pytest.mark.parametrize("mapped_pages", [0, 1, 16])
def test_what_is_written_by_the_system_or_by_the_mapping_is_the_same(
    mapped_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAPPED_BYTES", max(1, mapped_pages * PAGE))
    writer = SharedMemoryWriter(16 * PAGE)
    reader = SharedMemoryReader(writer.fd)
    for value in (3, 4, 5):  # the second time the pages are there
        offsets = [write(writer, PAGE - HEADER, value), write(writer, 2 * PAGE, value + 100)]
        assert offsets == [0, PAGE]
        first, second = reader.read(0), reader.read(PAGE)
        assert (set(first.tolist()), len(first)) == ({value}, PAGE - HEADER)
        assert (set(second.tolist()), len(second)) == ({value + 100}, 2 * PAGE)
        del first, second
        for offset in reader.take_released():
            writer.release(offset)
    writer.close()


def test_pages_beyond_what_is_kept_are_given_back_with_the_last_array_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * PAGE)
    writer = SharedMemoryWriter(16 * PAGE)

    def num_pages() -> int:
        return os.fstat(writer.fd).st_blocks * 512 // PAGE

    offsets = [write(writer, PAGE - HEADER) for _ in range(6)]
    assert num_pages() == 6
    for offset, left in zip((4, 5, 1, 0, 3, 2), (6, 4, 4, 4, 3, 2), strict=True):
        at = offsets[offset]
        assert at is not None
        writer.release(at)
        assert num_pages() == left, offset
    writer.close()


@pytest.mark.parametrize("offset", [-PAGE, PAGE // 2, 16 * PAGE, 15 * PAGE + 1])
def test_a_place_that_no_array_has_is_refused(writer: SharedMemoryWriter, offset: int) -> None:
    with pytest.raises(ValueError, match=f"no array at {offset}"):
        SharedMemoryReader(writer.fd).read(offset)


def test_a_length_may_reach_to_the_end_of_the_memory(writer: SharedMemoryWriter) -> None:
    reader, place = SharedMemoryReader(writer.fd), 15 * PAGE
    os.pwrite(writer.fd, (PAGE - HEADER + 1).to_bytes(8, "little"), place)
    with pytest.raises(ValueError, match="longer than the memory"):
        reader.read(place)
    os.pwrite(writer.fd, (PAGE - HEADER).to_bytes(8, "little"), place)
    assert len(reader.read(place)) == PAGE - HEADER


def test_a_place_can_be_read_again_once_it_was_dropped(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.fd)
    offset = write(writer, 10)
    assert offset is not None
    content = reader.read(offset)
    with pytest.raises(ValueError, match="no array at"):
        reader.read(offset)
    assert not content.flags.writeable
    del content
    assert len(reader.read(offset)) == 10
    assert reader.take_released() == [offset, offset]


def test_a_system_without_shared_memory_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", none)
    assert create_shared_memory() is None
    assert caplog.messages == ["no memory can be shared with replicas: not here"]


def test_the_memory_of_a_replica_is_a_gibibyte_of_addresses() -> None:
    writer = create_shared_memory()
    assert writer is not None
    assert os.fstat(writer.fd).st_size == 1 << 30
    assert os.fstat(writer.fd).st_blocks == 0
    writer.close()


def test_a_quarter_of_a_gibibyte_is_kept() -> None:
    assert module.KEPT_BYTES == 256 << 20


# -- Arrays and bytes --


@pytest.mark.parametrize(
    "value",
    [
        *(np.arange(6, dtype=kind).reshape(2, 3) for kind in ("<f4", "<i2", ">i8", "|u1", "<c8", "<f2")),
        *(
            np.array([True, False]),
            np.zeros((0, 3), np.float32),
            np.arange(12)[::2],
            np.ones((2, 1), np.float32).T,
        ),
        *(torch.arange(6, dtype=kind).reshape(2, 3) for kind in (torch.bfloat16, torch.float32, torch.int64)),
        torch.zeros((0, 2), dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T,
    ],
    ids=str,
)
def test_an_array_comes_back_from_its_bytes(value: Any) -> None:
    assert is_array(value)
    content = as_bytes(value).tobytes()
    back: Any = from_bytes(content, type_name(value), tuple(value.shape))
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert bool((back == value).all())


@pytest.mark.parametrize(
    ("content", "name", "shape", "problem"),
    [
        (b"1234", "<f4", (2,), "4 bytes are no <f4 of shape"),
        (b"12345678", "<f4", (1,), "8 bytes are no <f4"),
        (b"1234", "<f4", (-1,), "no shape"),
        (b"1234", "<f4", (1.0,), "no shape"),
        (b"", "|O", (0,), "no type of numbers"),
        (b"", "<U4", (0,), "no type of numbers"),
        (b"", "f4", (0,), "no type of numbers"),
        (b"", "<f4,<i4", (0,), "no type of numbers"),
        (b"", "torch.save", (0,), "no type of numbers"),
        (b"", "torch.nothing", (0,), "no type of numbers"),
        (b"", "numpy.float32", (0,), "no type of numbers"),
        (b"123", "torch.bfloat16", (1,), "3 bytes are no torch.bfloat16"),
    ],
)
def test_what_cannot_be_an_array_is_refused(
    content: bytes, name: str, shape: tuple[Any, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        from_bytes(content, name, shape)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None]), np.array(["2020"], "M8[D]")])
def test_arrays_of_other_things_do_not_cross(value: Any) -> None:
    with pytest.raises(NotImplementedError, match="do not cross the wire"):
        type_name(value)


def test_other_values_are_no_arrays() -> None:
    assert not any(map(is_array, (1, b"", [1], None)))


def test_a_tensor_on_memory_that_can_be_written_shares_it_and_another_is_copied() -> None:
    memory = np.zeros(8, np.uint8)
    shared: Any = from_bytes(memory, "torch.float32", (2,))
    shared[0] = 1.0
    assert memory.any()
    fixed = np.zeros(8, np.uint8)
    fixed.flags.writeable = False
    copied: Any = from_bytes(fixed, "torch.float32", (2,))
    copied[0] = 1.0
    assert not fixed.any()
