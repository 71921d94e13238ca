"""Which implementation each computation has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class FlashDecode(Protocol):
    """`flash_decode.flash_decode` has the meaning of the arguments."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        lengths: Tensor,
        most: int,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """None: torch does it."""

    flash_decode: FlashDecode | None = None


TORCH = Kernels()
