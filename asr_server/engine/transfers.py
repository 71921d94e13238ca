"""What is on its way: results to the host, audio into slots. On CPU everything has arrived at once."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A small tensor being copied to the host, behind everything launched before it."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[list[float]]:
        """The values; waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()


class EncodeTicket:
    """Chunks being encoded, perhaps on a stream of their own."""

    def __init__(self, encoded: torch.cuda.Event | None = None) -> None:
        self._encoded = encoded

    def is_done(self) -> bool:
        return self._encoded is None or bool(self._encoded.query())  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Makes what is launched from here on wait for it; the host goes on."""
        if self._encoded is not None:
            torch.cuda.current_stream().wait_event(self._encoded)
