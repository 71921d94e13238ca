"""Linear layers; on the CPU, their weights are reordered once for the library that multiplies by them.

oneDNN takes float32 and bfloat16, in half to two thirds of torch's time. On AVX2, FBGEMM keeps float32
weights in float16 where nothing is lost, in half of oneDNN's time. A row's result does not depend on the
number of rows.

In 8-bit integers scales are symmetric, one an output and one an input row, so a row's result does not depend
on the others. Without VNNI, pairs are summed in 16 bits; there weights get 7 bits, which cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.machine import LARGEST_WITHOUT_VNNI, VNNI_FLAGS, cpu_flags
from asr_server.model.kernels import TORCH, Kernels

_ROWS_HINT: Final = 8  # a layout that is good for few rows, and no worse for many
_FEW_ROWS, _MANY_ROWS = 8, 64
_FBGEMM_ROWS: Final = 6  # at once
_EXPONENTS: Final = (0, 3)  # 3 undoes the queries' 1/sqrt(64), by which small weights leave float16's range


def pack(weight: Tensor) -> PackedWeight | None:
    """Return the weight in its fastest layout; None: it stays as it is."""
    half = in_float16(weight) if _fbgemm_serves(weight) else None
    if half is not None:
        return half
    return OneDnnWeight(weight) if can_pack(weight) else None


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _fbgemm_serves(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    flags = cpu_flags()
    return "avx2" in flags and "avx512f" not in flags and hasattr(torch.ops.quantized, "linear_prepack_fp16")


class OneDnnWeight:
    """Its product and the others' take [..., inputs] to [..., outputs], with the exact GELU on request."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def product(self, x: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
        return _onednn_product(x, self._packed, bias, gelu)


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    num_rows = x.shape[:-1].numel()
    rows = padded_rows(x.flatten(0, -2)) if _FEW_ROWS < num_rows < _MANY_ROWS else x
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "gelu" if gelu else "none", [], "none")
    return y if rows is x else y[:num_rows].view(*x.shape[:-1], -1)


def padded_rows(rows: Tensor) -> Tensor:
    """Pad 9 to 63 rows [N, inputs] to a multiple of 8.

    oneDNN keeps a kernel for each row count: 100 MB for all that occur.
    """
    missing = -len(rows) % _FEW_ROWS if _FEW_ROWS < len(rows) < _MANY_ROWS else 0
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def multiply(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x y^T + bias; in float32 on AMD, twice as fast as MKL."""
    return _onednn_product(x, y, bias) if can_pack(y) else F.linear(x, y, bias)


class HalfWeight:
    def __init__(self, weight: Tensor, exponent: int) -> None:
        scaled = weight.detach().float() * 2**exponent
        self._packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        self._input_scale = 2.0**-exponent

    def product(self, x: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
        rows = x.flatten(0, -2)
        num_rows = len(rows)
        if self._input_scale != 1:
            rows = rows * self._input_scale
        # For one row or two that are left over, the kernel sums in another order.
        left_over = num_rows % _FBGEMM_ROWS
        if left_over in (1, 2):
            rows = F.pad(rows, (0, 0, 0, 3 - left_over))
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)[:num_rows]
        if bias is not None:
            y.add_(bias)
        return (F.gelu(y) if gelu else y).view(*x.shape[:-1], -1)


def in_float16(weight: Tensor) -> HalfWeight | None:
    """Return the weight in float16 if exact, else None."""
    for exponent in _EXPONENTS:
        scaled = weight.detach() * 2**exponent
        if torch.equal(scaled.to(torch.float16).float(), scaled):
            return HalfWeight(weight, exponent)
    return None


# -- In 8-bit integers ---------------------------------------------------------------------------------------

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

    def product(self, x: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
        rounded, scales = round_rows(x.flatten(0, -2))
        product = self._multiply(rounded, x.dtype)
        y = product.mul_(scales) if bias is None else torch.addcmul(bias, product, scales, out=product)
        return (F.gelu(y) if gelu else y).view(*x.shape[:-1], -1)

    def _multiply(
        self,
        rounded: Tensor,
        dtype: torch.dtype,
        step: float = 1.0,
        zero: int = _SIGN_BIT,
        bias: Tensor | None = None,
        on_top: str = "none",
    ) -> Tensor:
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(padded_rows(rounded), step, zero),
            *(self._packed, self._scales, self._zeros, bias),
            *(1.0, 0, dtype),  # the result's step and zero, if it were in 8 bits itself
            *(on_top, [], "none"),
        )
        return product[: len(rounded)]


class Int8EncoderWeight(Int8Weight):
    """Apply GELU, where asked for, in the same pass, with one scale for all rows: they are one chunk's."""

    def product(self, x: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
        if not gelu:
            return super().product(x, bias)
        rounded, step, zero = round_together(x.flatten(0, -2))
        return self._multiply(rounded, x.dtype, step, zero, bias, "gelu").view(*x.shape[:-1], -1)


PackedWeight = OneDnnWeight | HalfWeight | Int8Weight
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

    `rows` (int32 [N]) are those of the weights [N] in packed rows of m numbers. `starts` (int32 [G]) are the
    beginnings of sums in `rows`. Returns float32 [G, m].
    """
    sums: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        packed, rows, starts, per_sample_weights=weights.float()
    )
    return sums


# -- The layers ----------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """`y = x W^T + b`, with the exact GELU on request."""

    weight: Tensor
    bias: Tensor
    packing: Callable[[Tensor], PackedWeight | None] = staticmethod(pack)

    def __init__(self, num_inputs: int, num_outputs: int, gelu: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.gelu = gelu
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        """Pack the loaded weights, which can then be neither read nor changed."""
        self.packed = self.packing(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        if self.packed is not None:
            return self.packed.product(x, self.bias, self.gelu)
        if self.gelu and x.is_cuda and x.element_size() == 2:
            return linear_gelu(x, self.weight, self.bias)
        if kernels.row_product is not None and is_one_row(x):
            row: Tensor = kernels.row_product(x, self.weight, self.bias, self.gelu)
            return row
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y) if self.gelu else y


class Int8Linear(Linear):
    packing = Int8Weight


class Int8EncoderLinear(Linear):
    packing = Int8EncoderWeight

    def pack(self) -> None:
        super().pack()
        if self.gelu:
            self.bias = nn.Parameter(self.bias.float())


def is_one_row(x: Tensor) -> bool:
    return x.numel() == x.shape[-1]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return GELU(x W^T + b) in 16 bits; on a GPU, cuBLAS fuses it.

    Its tanh approximation is off by 5e-4, too much for float32.
    """
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], -1)
