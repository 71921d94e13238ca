"""The streams of a GPU that an engine works on, and which of them goes first. On the CPU there are none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DEFAULT_PRIORITY = 0
# The lower goes first: a step's small kernels do not queue behind an encode's large ones.
DECODE_PRIORITY = -1


def new_stream(priority: int = DEFAULT_PRIORITY) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


class DecodeStream:
    """Where all runs that is neither an encode nor a copy. `with decode_stream.entered():` launches there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(DECODE_PRIORITY) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        """Lets what is launched here from now on wait for the stream that the caller is in."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
