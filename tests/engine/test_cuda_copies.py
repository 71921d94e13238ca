"""Copies between host and device on streams that are stand-ins, and the shapes of recorded graphs."""

from __future__ import annotations

import pytest
import torch

from asr_server.engine.cuda import (
    DECODE_PRIORITY,
    DEFAULT_PRIORITY,
    DecodeStream,
    HostCopy,
    Transfers,
    batch_buckets,
    context_buckets,
    new_stream,
    row_buckets,
    sizes_of,
    smallest,
)
from tests.engine.stream_stand_ins import StandInStream, entered, imitate_streams

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_shapes_grow_in_steps_that_cost_little() -> None:
    assert row_buckets(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100]
    assert row_buckets(3) == [1, 2, 3]
    assert row_buckets(96) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96]
    assert batch_buckets(33) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33]
    assert batch_buckets(1) == [1]
    assert context_buckets(448) == [64, 128, 256, 448]
    assert context_buckets(60) == [60]
    assert sizes_of([(1, 64), (2, 64), (1, 9)]) == [[1, 2], [9, 64]]
    assert smallest([[1, 2, 4], [9, 64]], (3, 9)) == (4, 9)
    with pytest.raises(IndexError):
        smallest([[1, 2, 4], [9, 64]], (5, 9))


def test_on_a_cpu_nothing_is_copied_and_all_is_there() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    transfers = Transfers(CPU, overlap=True)
    assert transfers.to_device(tensor) is tensor
    copy = transfers.to_host(tensor)
    assert copy.is_ready()
    assert copy.read() == [[0, 1, 2], [3, 4, 5]]
    assert copy.array().base is not None, "the same memory"
    with DecodeStream(CPU).entered():
        DecodeStream(CPU).wait_for_current()


def test_decoding_has_a_stream_of_its_own_that_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    before = StandInStream.current
    before.clock[before.number] = 4
    decoding = DecodeStream(GPU)
    with decoding.entered():
        own = StandInStream.current
        assert own is not before
        assert own.priority == DECODE_PRIORITY < DEFAULT_PRIORITY == new_stream().priority
        assert before.number not in own.clock
    decoding.wait_for_current()
    assert own.clock[before.number] == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_copied_to_a_device_is_there_for_the_stream_that_computes(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=overlap)
    used: list[StandInStream] = []
    recorded: list[object] = []
    pinned: list[int] = []

    def copy(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        used.append(StandInStream.current)
        StandInStream.current.launch()
        return tensor.clone()

    monkeypatch.setattr("asr_server.engine.cuda.copy_to", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(1) or tensor)  # type: ignore[func-returns-value]
    transfers, computing = Transfers(GPU, overlap), StandInStream()
    with entered(computing):
        found = transfers.to_device(torch.ones(3))
    assert found.tolist() == [1, 1, 1]
    assert pinned == [1]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    with entered(computing):
        transfers.to_device(torch.ones(3))
    assert pinned == [1], "pinned already"
    if overlap:
        assert used[0] is used[1] is not computing
        assert computing.clock[used[0].number] == 2
        assert recorded == [computing] * 2
    else:
        assert used == [computing] * 2
        assert recorded == []


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_copied_to_the_host_is_read_when_it_has_arrived(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=overlap)
    recorded: list[object] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    transfers, computing = Transfers(GPU, overlap), StandInStream()
    streams = StandInStream.made[-3:-1] if overlap else [computing, computing]
    computing.clock[computing.number] = 5
    tensor = torch.arange(3.0)[None]
    with entered(computing):
        copy = transfers.to_host(tensor)
    tensor.fill_(9)
    assert recorded == ([streams[1]] if overlap else [])
    assert streams[1].clock[computing.number] == 5
    polls = [copy.is_ready() for _ in range(6)]
    assert polls == sorted(polls)
    assert polls[-1], "in the end"
    assert copy.read() == [[0, 1, 2]]
    assert StandInStream.host[computing.number] == 5


def test_an_array_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    StandInStream.current.clock[StandInStream.current.number] = 3
    copy = HostCopy(torch.ones(2, 2))
    assert StandInStream.host == {}
    assert copy.array().tolist() == [[1, 1], [1, 1]]
    assert StandInStream.host == {StandInStream.current.number: 3}
