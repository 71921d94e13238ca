"""Copies between host and device that the host does not wait for. On CPU nothing is copied."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from asr_server.engine.streams import new_stream


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
        """For use in the current stream."""
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
        """Of what the current stream has computed; `tensor` may be overwritten by what follows there."""
        if self._d2h is None:
            return HostCopy(tensor)
        result = tensor.clone()
        self._d2h.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._d2h):
            copy = HostCopy(result)
        result.record_stream(self._d2h)
        return copy


class HostCopy:
    """A small tensor being copied to the host, behind everything launched before it."""

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
        """The same as an array, which shares its memory."""
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
