"""CPU weights, reordered once for the library that multiplies by them.

oneDNN takes float32 and bfloat16, in half to two thirds of torch's time. On AVX2, FBGEMM keeps float32
weights in float16 where nothing is lost, in half of oneDNN's time. A row's result does not depend on the
number of rows.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.machine import cpu_flags

_ROWS_HINT: Final = 8  # a layout that is good for few rows, and no worse for many
_FEW_ROWS, _MANY_ROWS = 8, 64
_FBGEMM_ROWS: Final = 6  # at once
_EXPONENTS: Final = (0, 3)  # 3 undoes the queries' 1/sqrt(64), by which small weights leave float16's range


class PackedWeight(Protocol):
    def product(self, x: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
        """Multiply [..., inputs] to [..., outputs], with the exact GELU on request."""


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
