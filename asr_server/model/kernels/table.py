"""Which implementation each computation has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

NUM_WARPS = (2, 1, 4)  # of a program of flash_decode, that are worth trying; the first where none is tried


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
        *,
        num_warps: int = NUM_WARPS[0],
    ) -> Tensor: ...


class ChooseToken(Protocol):
    """`choose_token.choose_token` has the meaning of the arguments."""

    def __call__(
        self,
        scores: Tensor,
        suppressed: Tensor,
        active: Tensor,
        timestamps: Tensor,
        num_generated: Tensor,
        token: Tensor,
        previous: Tensor,
        last_time: Tensor,
        end_of_text: int,
        first_time: int,
        last_initial_time: int,
        tokens: Tensor,
        logprobs: Tensor,
    ) -> None: ...


class AddNorm(Protocol):
    """`add_norm.add_norm` has the meaning of the arguments."""

    def __call__(
        self, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, limit: float | None
    ) -> tuple[Tensor, Tensor]: ...


class BiasGelu(Protocol):
    """`bias_gelu.bias_gelu` has the meaning of the arguments."""

    def __call__(self, x: Tensor, bias: Tensor) -> Tensor: ...


class QuantiseRows(Protocol):
    """`quantise_rows.quantise_rows` has the meaning of the arguments."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


class EncoderAttention(Protocol):
    """`cudnn_attention.cudnn_attention` has the meaning of the arguments."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """None: torch does it."""

    flash_decode: FlashDecode | None = None
    choose_token: ChooseToken | None = None
    add_norm: AddNorm | None = None
    bias_gelu: BiasGelu | None = None
    quantise_rows: QuantiseRows | None = None
    encoder_attention: EncoderAttention | None = None  # not in Triton: cuDNN's, taken only where it was tried


TORCH = Kernels()
