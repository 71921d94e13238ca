"""CUDA streams, graphs and asynchronous copies.

A decode step is hundreds of kernels, slower to launch than to run, so it is replayed as graphs, one for
each shape. The CPU needs none of it. Knows no Whisper.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from asr_server.machine import gc_paused

# The lower goes first: a step's small kernels do not queue behind an encode's large ones.
DECODE_PRIORITY = -1


def new_stream(priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def decode_stream(device: torch.device) -> torch.cuda.Stream | None:
    return new_stream(DECODE_PRIORITY) if device.type == "cuda" else None


# Two replicas in one process (executor inline) must not record at the same time.
_CAPTURE_LOCK = threading.Lock()

Shape = tuple[int, ...]

logger = logging.getLogger(__name__)


def record_graphs(
    compute: Callable[..., Tensor], shapes: Collection[Shape], device: torch.device, priority: int = 0
) -> Graphs | None:
    """Record a computation that always reads the same tensors.

    Returns None on CPU, and after a warning where recording fails.
    """
    if device.type != "cuda":
        return None
    started = time.monotonic()
    try:
        with torch.inference_mode():
            graphs = Graphs(compute, shapes, priority)
        seconds, name = time.monotonic() - started, getattr(compute, "__qualname__", "a function")
        logger.info("recorded %d graphs of %s in %.1f s", len(shapes), name, seconds)
        return graphs
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises where the device itself has failed: then nothing can go on
        logger.warning("CUDA graphs cannot be recorded, going on without them: %s", error)
        return None


class Graphs:
    """One computation in several shapes and one memory pool, the largest first.

    Recorded on its own stream: recordings of one stream share cuBLAS's workspace, and replays would
    overwrite it. Kernels keep the stream's priority, whichever stream replays them.
    """

    def __init__(self, compute: Callable[..., Tensor], shapes: Collection[Shape], priority: int) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = new_stream(priority)
        largest_first = sorted(shapes, key=math.prod, reverse=True)
        self._graphs = {shape: self._capture(compute, shape) for shape in largest_first}

    def _capture(self, compute: Callable[..., Tensor], shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute(*shape)  # cuBLAS and the allocator settle before anything is recorded
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        recording = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            # To collect an earlier graph spoils a recording (torch pull request 161037).
            with _CAPTURE_LOCK, gc_paused(), recording:
                return graph, compute(*shape)
        except RuntimeError:  # which torch cannot end itself (up to 2.12, pull request 180395)
            torch.cuda.set_stream(before)
            with contextlib.suppress(RuntimeError):  # it has ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            raise

    def replay(self, *shape: int) -> Tensor:
        """Compute a recorded shape; the next replay overwrites the result."""
        graph, output = self._graphs[shape]
        graph.replay()
        return output


def sizes_up_to(most: int, means_from: int) -> list[int]:
    """Return powers of two, from `means_from` on also their means, and the most, but nothing near it."""
    powers = [1 << power for power in range(most.bit_length())]
    means = [3 * power // 2 for power in powers if power >= means_from]
    return sorted({*(size for size in [*powers, *means] if 4 * size < 3 * most), most})


def size_for(number: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds the number; the number itself where there are no sizes."""
    return sizes[bisect_left(sizes, number)] if sizes else number


class Transfers:
    """Copies between host and device; on CUDA through pinned memory, without waiting.

    With `overlap`, each direction has its own stream (PyTorch pull request 115286).
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._device, overlaps = device, overlap and device.type == "cuda"
        self._h2d = new_stream() if overlaps else None
        self._d2h = new_stream() if overlaps else None

    def to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        if self._h2d is None:
            return self._copied(tensor)
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._h2d):
            copied = self._copied(tensor)
        computing.wait_stream(self._h2d)
        copied.record_stream(computing)
        return copied

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Copy the current stream's result; a GPU's `tensor` may then be overwritten."""
        if self._d2h is None:
            return HostCopy(tensor)
        result = tensor.clone()
        self._d2h.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._d2h):
            copy = HostCopy(result)
        result.record_stream(self._d2h)
        return copy


class Pending:
    """All that the current stream has launched so far; on CPU, it is done."""

    def __init__(self, is_on_gpu: bool) -> None:
        self._event: torch.cuda.Event | None = None
        if is_on_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Let the current stream wait for it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class HostCopy(Pending):
    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)  # from a GPU into pinned memory, which torch reuses
        super().__init__(tensor.is_cuda)

    def array(self) -> npt.NDArray[Any]:
        """Wait for the values; return an array on the same memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
