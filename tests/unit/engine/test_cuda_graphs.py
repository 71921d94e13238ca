"""Which graph serves which step. The graphs themselves need a GPU: test_cuda.py has them there."""

import gc
import logging
from typing import Any

import pytest
import torch

from asr_server.engine import cuda
from asr_server.engine.cuda import size_for, sizes_up_to
from tests.unit.engine.stream_stand_ins import StandInStream, imitate_streams


@pytest.mark.parametrize("most", [1, 3, 8, 50, 128, 768])
def test_every_number_of_rows_has_a_size_that_costs_little_more(most: int) -> None:
    sizes = sizes_up_to(most, 16)
    assert sizes[-1] == most
    assert len(sizes) <= 16
    assert all(rows <= size_for(rows, sizes) < max(2 * rows, rows + 8) for rows in range(1, most + 1))
    assert sizes_up_to(11, 11) == [1, 2, 4, 8, 11]
    assert size_for(7, []) == 7


class StandInCapture:
    """torch.cuda.graph: notes how it is called."""

    calls: list[dict[str, Any]]

    def __init__(self, graph: object, pool: object, stream: object, **how: Any) -> None:
        state = {"pool": pool, "stream": stream, **how}
        StandInCapture.calls.append(state)

    def __enter__(self) -> None:
        state = {"locked": cuda._CAPTURE_LOCK.locked(), "collects": gc.isenabled()}
        StandInCapture.calls[-1] |= state

    def __exit__(self, *_: object) -> None: ...


def test_recordings_disturb_no_other_thread_and_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inline replicas are threads of one process."""
    imitate_streams(monkeypatch, copy_overlap=False)
    StandInCapture.calls = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", StandInCapture)
    shapes: list[tuple[int, ...]] = []

    def compute(*shape: int) -> torch.Tensor:
        shapes.append(shape)
        return torch.zeros(shape)

    cuda.record_graphs(compute, [(1, 2), (4, 2), (4, 8)], torch.device("cuda"), priority=-1)
    assert list(dict.fromkeys(shapes)) == [(4, 8), (4, 2), (1, 2)], "the largest first"
    for call in StandInCapture.calls:
        assert call["locked"]
        assert not call["collects"], "an earlier engine's graphs would be destroyed meanwhile"
        assert call["capture_error_mode"] == "thread_local"
        assert call["pool"] == "pool"
        assert call["stream"].priority == -1
    assert gc.isenabled()


class EndlessCapture:
    """torch.cuda.graph where something illegal was recorded: its end fails, and the stream stays current."""

    def __init__(self, graph: object, pool: object, stream: StandInStream, **_: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        StandInStream.current = self._stream

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_recording_that_fails_leaves_neither_its_stream_nor_the_allocator_behind(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    calls: list[Any] = []

    def end(*where: object) -> None:
        if has_ended:
            raise RuntimeError("not currently recording to mempool_id")
        calls.append(("ended", *where))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", EndlessCapture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(StandInStream, "current", stream))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda *where: calls.append(("released", *where)), raising=False
    )
    before = StandInStream.current
    assert cuda.record_graphs(torch.zeros, [(1,)], torch.device("cuda")) is None
    assert StandInStream.current is before
    assert calls == ([] if has_ended else [("ended", 3, (0, 7)), ("released", 3, (0, 7))])


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing"), None])
def test_an_engine_goes_on_without_graphs_that_cannot_be_recorded(
    error: RuntimeError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error or torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "Graphs", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if error is None:  # without graphs it would not have the memory either
        with pytest.raises(torch.OutOfMemoryError):
            cuda.record_graphs(torch.zeros, [(1,)], torch.device("cuda"))
    else:
        with caplog.at_level(logging.WARNING, logger=cuda.__name__):
            assert cuda.record_graphs(torch.zeros, [(1,)], torch.device("cuda")) is None
        assert "going on without them" in caplog.text


def test_a_device_that_failed_while_graphs_were_recorded_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cuda, "Graphs", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cuda.record_graphs(torch.zeros, [(1,)], torch.device("cuda"))
    assert "going on without them" not in caplog.text
