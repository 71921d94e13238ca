"""CUDA streams, graphs and asynchronous copies.

A decode step is hundreds of kernels, slower to launch than to run, so it is replayed as graphs, one for
each shape. The CPU needs none of it. Knows no Whisper.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from asr_server.machine import gc_paused

DEFAULT_PRIORITY = 0
# The lower goes first: a step's small kernels do not queue behind an encode's large ones.
DECODE_PRIORITY = -1


def new_stream(priority: int = DEFAULT_PRIORITY) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


class DecodeStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(DECODE_PRIORITY) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())


# Two replicas in one process (executor inline) must not record at the same time.
_CAPTURE_LOCK = threading.Lock()

Shape = tuple[int, ...]

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    def replay(self, *least: int) -> Tensor: ...


def record_graphs(
    compute: Callable[..., Tensor],
    shapes: Collection[Shape],
    device: torch.device,
    priority: int = DEFAULT_PRIORITY,
) -> Replayable | None:
    """Record a computation. Return None on CPU, and log it where recording fails."""
    if device.type != "cuda":
        return None
    try:
        with torch.inference_mode():
            return Graphs(compute, shapes, priority)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises where the device itself has failed: then nothing can go on
        logger.warning("CUDA graphs cannot be recorded, going on without them: %s", error)
        return None


class Graphs:
    """One computation in several shapes and one memory pool, the largest first.

    Recorded on its own stream: recordings of one stream share cuBLAS's workspace, and replays would
    overwrite it.
    """

    def __init__(self, compute: Callable[..., Tensor], shapes: Collection[Shape], priority: int) -> None:
        """Args:
        compute: takes the numbers of a shape; always reads the same tensors.
        shapes: all combinations of sizes, or those that will be asked for exactly.
        priority: of its kernels, whichever stream replays them (cudaGraphInstantiateFlagUseNodePriority).
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = new_stream(priority)
        self._sizes = sizes_of(shapes)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for shape in sorted(shapes, key=math.prod, reverse=True):
            self._graphs[shape] = self._capture(compute, shape)

    def _capture(self, compute: Callable[..., Tensor], shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute(*shape)  # cuBLAS and the allocator settle before anything is recorded
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with (
                _CAPTURE_LOCK,
                gc_paused(),  # to collect an earlier graph spoils a recording (torch pull request 161037)
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                output = compute(*shape)
        except RuntimeError:
            self._end_failed_capture(before)
            raise
        return graph, output

    def _end_failed_capture(self, before: torch.cuda.Stream) -> None:
        """Clean up after a recording that torch cannot end (up to 2.12, pull request 180395)."""
        torch.cuda.set_stream(before)
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)

    def replay(self, *least: int) -> Tensor:
        """Compute the smallest shape that covers `least`; the next replay overwrites the result.

        Raises:
            IndexError: none is so large.
        """
        graph, output = self._graphs[smallest(self._sizes, least)]
        graph.replay()
        return output


def sizes_of(shapes: Collection[Shape]) -> list[list[int]]:
    return [sorted(set(sizes)) for sizes in zip(*shapes, strict=True)]


def smallest(sizes: Sequence[Sequence[int]], least: Shape) -> Shape:
    """Return the smallest sizes not below `least`. Raises IndexError."""
    return tuple(each[bisect_left(each, wanted)] for each, wanted in zip(sizes, least, strict=True))


def row_buckets(num_rows: int) -> list[int]:
    """Return powers of two and their means from 16 on, and the most: 16 for 768 rows."""
    powers = [1 << power for power in range(num_rows.bit_length())]
    return _up_to(num_rows, [*powers, *(3 * power // 2 for power in powers if power >= 16)])


def batch_buckets(num_chunks: int) -> list[int]:
    """Return powers of two, and the most: 1, 2, 4, 8, 11."""
    return _up_to(num_chunks, [1 << power for power in range((3 * num_chunks // 4).bit_length())])


def _up_to(most: int, sizes: list[int]) -> list[int]:
    return sorted({*(size for size in sizes if size < most), most})


class Transfers:
    """Copies between host and device; on CUDA through pinned memory, without waiting.

    With `overlap`, each direction has its own stream (PyTorch pull request 115286).
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._device = device
        self._h2d: torch.cuda.Stream | None = None
        self._d2h: torch.cuda.Stream | None = None
        if overlap and device.type == "cuda":
            self._h2d, self._d2h = new_stream(), new_stream()

    def fill(self, target: Tensor, tensor: Tensor) -> None:
        """Overwrite memory of the device that the current stream uses."""
        if self._h2d is None:
            target.copy_(self._pinned(tensor), non_blocking=True)
        else:
            target.copy_(self.to_device(tensor))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor if self._device.type != "cuda" or tensor.is_pinned() else tensor.pin_memory()

    def to_device(self, tensor: Tensor) -> Tensor:
        tensor = self._pinned(tensor)
        if self._h2d is None:
            return copy_to(self._device, tensor)
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._h2d):
            copied = copy_to(self._device, tensor)
        computing.wait_stream(self._h2d)
        copied.record_stream(computing)
        return copied

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


class HostCopy:
    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if is_on_gpu(tensor):
            self._host = pinned_like(tensor)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def is_ready(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[list[float]]:
        values: list[list[float]] = self.array().tolist()
        return values

    def array(self) -> npt.NDArray[Any]:
        """Wait for the values; return an array on the same memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def pinned_like(tensor: Tensor) -> Tensor:
    """Return host memory that a GPU can write to; torch reuses it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
