"""Rows in 8-bit floats, each with a scale of its own, in one pass. Used by `linear_fp8.py`.

`float8.quantise` is torch's way, with several results the size of the input in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr_server.model.float8 import FP8, LARGEST, TINY

_ROWS = 1  # of a program


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit floats of x [rows, D], contiguous, and float32 scales [rows, 1]; their product is nearly x."""
    assert x.is_contiguous()
    num_rows, width = x.shape
    quantised = torch.empty_like(x, dtype=FP8)
    scales = torch.empty(num_rows, 1, device=x.device)
    _quantise_rows[triton.cdiv(num_rows, _ROWS),](
        x,
        quantised,
        scales,
        num_rows,
        width,
        LARGEST=LARGEST,
        TINY=TINY,
        ROWS=_ROWS,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return quantised, scales


# Compiled once, whatever the number of rows.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _quantise_rows(  # type: ignore[no-untyped-def]
    x,
    quantised,
    scales,
    num_rows,
    width,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (n < width)[None, :]
    place = rows[:, None] * width + n[None, :]
    y = tl.load(x + place, inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 1), TINY) / LARGEST
    tl.store(scales + rows, scale, rows < num_rows)
    tl.store(quantised + place, (y / scale[:, None]).to(quantised.dtype.element_ty), inside)
