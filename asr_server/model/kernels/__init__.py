"""Triton kernels for GPUs, each beside torch's operations. `choice.py` decides whether they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Kernels:
    """The kernels in use, named as the functions; None: torch's operations."""

    flash_decode: Callable[..., Tensor] | None = None
    store_audio: Callable[..., None] | None = None
    row_lengths: Callable[..., tuple[Tensor, ...]] | None = None
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    norm_product: Callable[..., tuple[Tensor, Tensor]] | None = None  # these two of one row
    row_product: Callable[..., Tensor] | None = None
    choose_token: Callable[..., None] | None = None
    advance: Callable[..., None] | None = None


TORCH = Kernels()
