"""Has what an engine needs of a GPU beyond torch: streams, graphs, copies that the host does not wait for.

A decode step is hundreds of kernels, and launching them one by one takes longer than running them: it is
recorded as CUDA graphs, one for each shape, of which the one that fits is replayed. On the CPU there are no
streams and no graphs, and nothing is copied. Runs in the replica's process. Used by all of `engine` that
computes; knows no Whisper.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

DEFAULT_PRIORITY = 0
# The lower goes first: a step's small kernels do not queue behind an encode's large ones.
DECODE_PRIORITY = -1


def new_stream(priority: int = DEFAULT_PRIORITY) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


class DecodeStream:
    """The stream of everything but encodes and copies. `with decode_stream.entered():` launches on it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(DECODE_PRIORITY) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        """Makes later launches on this stream wait for the caller's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())


_WARM_UPS = 2  # cuBLAS and the allocator settle before anything is recorded

# Two replicas in one process (executor inline) must not record at the same time.
_CAPTURE_LOCK = threading.Lock()

Shape = tuple[int, ...]

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    """A computation recorded in several shapes."""

    def replay(self, *least: int) -> Tensor: ...


def record_graphs(
    compute: Callable[..., Tensor],
    shapes: Collection[Shape],
    device: torch.device,
    priority: int = DEFAULT_PRIORITY,
) -> Replayable | None:
    """Graphs of a computation. None on CPU, and where recording fails, which is logged."""
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
    """One computation in several shapes, in one memory pool: the largest first, so that the others fit in.

    Recorded on a stream of its own: cuBLAS keeps a workspace for each stream, which all recordings from one
    stream share, and their replays on several streams at once would then write into it together.
    """

    def __init__(self, compute: Callable[..., Tensor], shapes: Collection[Shape], priority: int) -> None:
        """
        Args:
            compute: is called with the numbers of a shape; reads always the same tensors.
            shapes: all combinations of some sizes of each of their numbers.
            priority: of its kernels. They keep that of the stream they are recorded on, whichever stream
                they are replayed on (torch sets cudaGraphInstantiateFlagUseNodePriority).
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
            for _ in range(_WARM_UPS):
                compute(*shape)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with (
                _CAPTURE_LOCK,
                _without_garbage_collection(),
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
        """Does what torch leaves out where a recording cannot be ended because something in it was illegal.

        The stream of the recording would stay the current one. And for torch up to 2.12 (pull request 180395)
        the recording would never end: no memory that several streams used would be given back any more, and
        emptying the cache, as the next recording does first, would fail.
        """
        torch.cuda.set_stream(before)
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)

    def replay(self, *least: int) -> Tensor:
        """Computes the smallest shape that covers `least`. The result is overwritten by the next replay.

        Raises:
            IndexError: there is none so large.
        """
        graph, output = self._graphs[smallest(self._sizes, least)]
        graph.replay()
        return output


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """It may come upon graphs of an earlier engine, and to destroy one spoils the recording of another (torch
    pull request 161037).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sizes_of(shapes: Collection[Shape]) -> list[list[int]]:
    """Returns, for each number of the shapes, its sizes in ascending order."""
    return [sorted(set(sizes)) for sizes in zip(*shapes, strict=True)]


def smallest(sizes: Sequence[Sequence[int]], least: Shape) -> Shape:
    """The smallest size of each number that is not below `least`. Raises IndexError: there is none."""
    return tuple(each[bisect_left(each, wanted)] for each, wanted in zip(sizes, least, strict=True))


def row_buckets(num_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 64, steps of 32 beyond, and the most there can be."""
    return _up_to(num_rows, [1, 2, 4, *range(8, 65, 8), *range(96, num_rows, 32)])


def context_buckets(num_positions: int) -> list[int]:
    """Text positions that a step reads: most of what is said in 30 s fits in 128."""
    return _up_to(num_positions, [64, 128, 256])


def _up_to(most: int, sizes: list[int]) -> list[int]:
    return sorted({*(size for size in sizes if size < most), most})


class Transfers:
    """On CUDA through pinned memory, so that the host never waits for a copy to start or end.

    Without `overlap` a copy takes its turn in the stream that it is made in. With it, one stream carries all
    copies to the device and another all copies back, beside the computing (PyTorch pull request 115286).
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._device = device
        self._h2d: torch.cuda.Stream | None = None
        self._d2h: torch.cuda.Stream | None = None
        if overlap and device.type == "cuda":
            self._h2d, self._d2h = new_stream(), new_stream()

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copies to the device, for use in the current stream."""
        if self._device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        if self._h2d is None:
            return copy_to(self._device, tensor)
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._h2d):
            copied = copy_to(self._device, tensor)
        computing.wait_stream(self._h2d)
        copied.record_stream(computing)
        return copied

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Copies what the current stream has computed. On a GPU `tensor` may be overwritten by what follows
        there; on the CPU it is its own copy.
        """
        if self._d2h is None:
            return HostCopy(tensor)
        result = tensor.clone()
        self._d2h.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._d2h):
            copy = HostCopy(result)
        result.record_stream(self._d2h)
        return copy


class HostCopy:
    """A small tensor being copied to the host, after everything launched before it."""

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
        """The values; waits until they are there."""
        values: list[list[float]] = self.array().tolist()
        return values

    def array(self) -> npt.NDArray[Any]:
        """Returns the values as an array on the same memory; waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def pinned_like(tensor: Tensor) -> Tensor:
    """Memory of the host that a GPU can write to while the host goes on. torch keeps it for the next one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
