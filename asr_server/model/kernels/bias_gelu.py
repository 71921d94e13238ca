"""A bias and GELU (the exact one) in place, behind a product without one. Used by `linear.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 4, 1024  # of a program


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias, written over x.

    Args:
        x: [..., D], contiguous.
        bias: [D]
    """
    assert x.is_contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    _bias_gelu[triton.cdiv(width, _COLUMNS), triton.cdiv(num_rows, _ROWS)](
        x, bias, num_rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
    )
    return x


# Compiled once, whatever the number of rows.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _bias_gelu(  # type: ignore[no-untyped-def]
    x, bias, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (n < width)[None, :]
    place = rows[:, None] * width + n[None, :]
    y = tl.load(x + place, inside, other=0.0).to(tl.float32)
    y += tl.load(bias + n, n < width, other=0.0).to(tl.float32)[None, :]
    y *= 0.5 + 0.5 * tl.erf(y * 0.7071067811865476)
    tl.store(x + place, y.to(x.dtype.element_ty), inside)
