"""Products in 8-bit integers on the CPU, by oneDNN.

Scales are symmetric, one an output and one an input row, so a row's result does not depend on the others.
Without VNNI, pairs are summed in 16 bits; there weights get 7 bits, which cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.machine import LARGEST_WITHOUT_VNNI, VNNI_FLAGS, cpu_flags
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.layers import Linear
from asr_server.model.packed import padded_rows

_LARGEST = 127
_SIGN_BIT = 0x80  # turned over, it adds 128: oneDNN is slow for signed inputs where there is no AMX
_TINY = 1e-12  # for what is all zeros


def can_multiply_in_int8() -> bool:
    return hasattr(torch.ops.onednn, "qlinear_prepack") and bool(cpu_flags() & {"avx2"})


class Int8Weight:
    """A matrix [outputs, inputs] in 8 bits, in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        largest = _LARGEST if cpu_flags() & VNNI_FLAGS else LARGEST_WITHOUT_VNNI
        weight = weight.detach().float()
        self._scales = weight.abs().amax(1).clamp_(min=_TINY) / largest
        rounded = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        rounded, scales = round_rows(rows)
        product = self._multiply(rounded, rows.dtype)
        return product.mul_(scales) if bias is None else torch.addcmul(bias, product, scales, out=product)

    def product_with_gelu(self, rows: Tensor, bias: Tensor) -> Tensor:
        """Multiply and apply the exact GELU in one pass, with one scale for all rows."""
        rounded, step, zero = round_together(rows)
        return self._multiply(rounded, rows.dtype, step, zero, bias, "gelu")

    def _multiply(
        self,
        rounded: Tensor,
        dtype: torch.dtype,
        step: float = 1.0,
        zero: int = _SIGN_BIT,
        bias: Tensor | None = None,
        on_top: str = "none",
    ) -> Tensor:
        of_result = 1.0, 0, dtype  # its step and zero, if it were in 8 bits itself
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            padded_rows(rounded),
            step,
            zero,
            self._packed,
            self._scales,
            self._zeros,
            bias,
            *of_result,
            on_top,
            [],
            "none",
        )
        return product[: len(rounded)]


_NUMBERS_AT_ONCE = 1 << 19  # whose intermediate results stay in the processor's cache
# Added to a float32 of at most 2^22 it leaves the nearest integer in the lowest bits of the sum.
_TO_INTEGER = 1.5 * 2**23


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N, inputs] as 8-bit numbers plus 128, and scales [N, 1] in the precision of the rows."""
    rounded, scales = torch.empty_like(rows, dtype=torch.uint8), rows.new_empty(len(rows), 1)
    for block in _blocks(rows):
        exact = rows[block].float()
        largest = torch.maximum(exact.amax(-1, keepdim=True), -exact.amin(-1, keepdim=True))
        scales[block] = largest.clamp_(min=_TINY) / _LARGEST
        _write_rounded(exact / scales[block].float(), _SIGN_BIT, rounded[block])
    return rounded, scales


def round_together(rows: Tensor) -> tuple[Tensor, float, int]:
    """Return [N, inputs] as 8-bit numbers in even steps, the step, and the number for zero."""
    least, largest = (each.item() for each in torch.aminmax(rows))
    least, largest = min(least, 0.0), max(largest, 0.0)
    step = max(largest - least, _TINY) / 255
    zero = round(-least / step) if math.isfinite(step) else 0  # NaN comes through by the step
    rounded = torch.empty_like(rows, dtype=torch.uint8)
    for block in _blocks(rows):
        _write_rounded(rows[block].float() / step, zero, rounded[block])
    return rounded, step, zero


def _blocks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _NUMBERS_AT_ONCE // rows.shape[-1])
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


def _write_rounded(numbers: Tensor, zero: int, out: Tensor) -> None:
    """Write rounded float32 numbers plus `zero`. Changes `numbers`.

    torch converts to uint8 slowly, and takes an integer's lowest byte fast.
    """
    out.copy_(numbers.add_(_TO_INTEGER + zero).view(torch.int32))


def packed_row_bytes(length: int) -> int:
    """Return the bytes of a packed row: its numbers, then minimum and step in float32."""
    return length + 8


def pack_rows(matrix: Tensor) -> Tensor:
    """Pack [..., n] into bytes [..., n + 8]: each row in 256 even steps."""
    packed: Tensor = torch.ops.quantized.embedding_bag_byte_prepack(
        matrix.flatten(0, -2).float().contiguous()
    )
    return packed.view(*matrix.shape[:-1], -1)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    matrix: Tensor = torch.ops.quantized.embedding_bag_byte_unpack(packed.flatten(0, -2))
    return matrix.view(*packed.shape[:-1], -1).to(dtype)


def sum_weighted_packed_rows(weights: Tensor, packed: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    """Do the work of `layers.sum_weighted_rows` in half of bfloat16's time.

    Args:
        weights: [N].
        packed: rows of m numbers.
        rows: int32 [N], the row of each weight.
        starts: int32 [G], start of each sum in `rows`.
    Returns:
        float32 [G, m].
    """
    sums: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        packed, rows, starts, per_sample_weights=weights.float()
    )
    return sums


class Int8Linear(Linear):
    def pack(self) -> None:
        self._int8_weight = Int8Weight(self.weight)
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        y = self._int8_weight.product(x.flatten(0, -2), self.bias).view(*x.shape[:-1], -1)
        return F.gelu(y) if self.gelu else y


class Int8EncoderLinear(Int8Linear):
    """Use one input scale where GELU follows: the input must be one chunk."""

    def pack(self) -> None:
        super().pack()
        if self.gelu:
            self.bias = nn.Parameter(self.bias.float())

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        if not self.gelu:
            return super().forward(x, kernels)
        return self._int8_weight.product_with_gelu(x.flatten(0, -2), self.bias).view(*x.shape[:-1], -1)
