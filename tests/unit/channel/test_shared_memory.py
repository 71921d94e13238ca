"""Memory that a writer fills and a reader uses in place."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_server.channel.shared_memory import (
    KEPT_SLOTS,
    NUM_SLOTS,
    SLOT_BYTES,
    SharedMemoryReader,
    SharedMemoryWriter,
    create_shared_memory,
)


@pytest.fixture
def writer() -> Iterator[SharedMemoryWriter]:
    writer = SharedMemoryWriter(4)
    yield writer
    writer.close()


def filled(value: int, length: int = 5000) -> np.ndarray:
    return np.full(length, value, np.uint8)


def taken_bytes(writer: SharedMemoryWriter) -> int:
    return os.fstat(writer.fd).st_blocks * 512


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


def test_memory_beyond_what_is_kept_goes_back_to_the_system() -> None:
    writer = SharedMemoryWriter(KEPT_SLOTS + 2)
    slots = [writer.write(filled(1, SLOT_BYTES if n >= KEPT_SLOTS else 1)) for n in range(KEPT_SLOTS + 2)]
    before = taken_bytes(writer)
    for slot in slots:
        assert slot is not None
        writer.release(slot)
    assert before - taken_bytes(writer) == 2 * SLOT_BYTES
    writer.close()


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


def test_the_memory_of_a_replica_is_a_gibibyte_of_addresses_and_none_at_first() -> None:
    writer = create_shared_memory()
    assert writer is not None
    assert os.fstat(writer.fd).st_size == NUM_SLOTS * SLOT_BYTES == 1 << 30
    assert taken_bytes(writer) == 0
    writer.close()


def test_a_system_without_shared_memory_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert create_shared_memory() is None
    assert "no memory can be shared with replicas" in caplog.text


def test_nothing_is_left_when_the_writing_process_is_killed() -> None:
    code = (
        "import numpy as np; from asr_server.channel.shared_memory import *\n"
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
