"""Products in 8-bit integers on the CPU, by oneDNN: weights are rounded once, inputs in every call.

Each output of a weight and each row of the input has a scale, both symmetric, so that a row's result does not
depend on how many others there are. The results are float32. Where the processor sums pairs of 8-bit products
in 16 bits (AVX2 and AVX-512 without VNNI), weights get 7 bits, with which no such sum overflows.
Runs in the replica's process, on the CPU alone. Used by `weights.py`, `whisper.py`, `cache.py`, `silence.py`
and `engine/config.py`; knows no requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.machine import cpu_flags
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.layers import Linear
from asr_server.model.packed import padded_rows

VNNI_FLAGS = {"avx512_vnni", "avx_vnni"}  # as /proc/cpuinfo spells them
_LARGEST = 127
_LARGEST_IN_7_BITS = 63
_SIGN_BIT = 0x80  # turned over, it adds 128: oneDNN is slow for signed inputs where there is no AMX
_TINY = 1e-12  # for what is all zeros


def can_multiply_in_int8() -> bool:
    """Whether oneDNN is in this build of torch, with its kernels for x86."""
    return hasattr(torch.ops.onednn, "qlinear_prepack") and bool(cpu_flags() & {"avx2"})


class Int8Weight:
    """A matrix [outputs, inputs] in 8 bits, in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        largest = _LARGEST if cpu_flags() & VNNI_FLAGS else _LARGEST_IN_7_BITS
        weight = weight.detach().float()
        self._scales = weight.abs().amax(1).clamp_(min=_TINY) / largest
        rounded = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Float32 [N, outputs] of [N, inputs]."""
        rounded, scales = round_rows(rows)
        if bias is None:
            return self._multiply(rounded).mul_(scales)
        return torch.addcmul(bias, self._multiply(rounded), scales)

    def fine_product(self, rows: Tensor) -> Tensor:
        """As `product`, with inputs in twice as many bits: each row is a sum of two, the second one the first
        one's rounding error. It costs little where the time goes into reading the weights.
        """
        rounded, scales = round_rows(rows)
        lost, lost_scales = round_rows(rows - signed(rounded).float().mul_(scales))
        coarse, fine = self._multiply(torch.cat([rounded, lost])).chunk(2)
        product: Tensor = coarse.mul_(scales).addcmul_(fine, lost_scales)
        return product

    def _multiply(self, rounded: Tensor) -> Tensor:
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            padded_rows(rounded),
            1.0,
            _SIGN_BIT,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "none",
        )
        return product[: len(rounded)]


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, inputs] as 8-bit numbers plus 128, and the scales [N, 1] that they are to be multiplied by."""
    largest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
    scales = largest.float().clamp_(min=_TINY) / _LARGEST
    rounded = (rows / scales).round_().to(torch.int8)
    return rounded.view(torch.uint8).bitwise_xor_(_SIGN_BIT), scales


def signed(rounded: Tensor) -> Tensor:
    """Returns the 8-bit numbers of `round_rows` without the 128."""
    return rounded.bitwise_xor(_SIGN_BIT).view(torch.int8)


def packed_row_bytes(length: int) -> int:
    """Returns the bytes of a packed row: its numbers, then its least number and its step in float32."""
    return length + 8


def pack_rows(matrix: Tensor) -> Tensor:
    """[..., n] to bytes [..., n + 8]: each row in 256 even steps from its least number to its largest."""
    packed: Tensor = torch.ops.quantized.embedding_bag_byte_prepack(
        matrix.flatten(0, -2).float().contiguous()
    )
    return packed.view(*matrix.shape[:-1], -1)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows given to `pack_rows`, rounded."""
    matrix: Tensor = torch.ops.quantized.embedding_bag_byte_unpack(packed.flatten(0, -2))
    return matrix.view(*packed.shape[:-1], -1).to(dtype)


def sum_weighted_packed_rows(weights: Tensor, packed: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    """As `layers.sum_weighted_rows`, in half the time of bfloat16's.

    Args:
        weights: [N].
        packed: any number of rows of m numbers.
        rows: int32 [N], which of them have these weights.
        starts: int32 [G], where in `rows` each sum begins.
    Returns:
        float32 [G, m].
    """
    sums: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        packed, rows, starts, per_sample_weights=weights.float()
    )
    return sums


class Int8Linear(Linear):
    """A product in 8-bit integers, in a model of float32."""

    def pack(self) -> None:
        self._int8_weight = Int8Weight(self.weight)
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        y = self._int8_weight.product(x.flatten(0, -2), self.bias).view(*x.shape[:-1], -1)
        return F.gelu(y) if self.gelu else y
