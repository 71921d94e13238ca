"""Triton kernels that read and write a tensor once: addition with layer norm, and rounding to 8-bit
floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr_server.model.float8 import FP8, LARGEST, TINY

_ROWS = 1  # rows of a program


def add_norm(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Return x + change and its layer norm.

    Args:
        x: [..., D], contiguous.
        change: the same, or fewer rows, which repeat.
        limit: greatest number of the sum; None: no limit.
    """
    assert x.is_contiguous()
    assert change.is_contiguous()
    width = x.shape[-1]
    total, normed = torch.empty_like(x), torch.empty_like(x)
    num_rows = x.numel() // width
    _add_norm[triton.cdiv(num_rows, _ROWS),](
        x, change, weight, bias, total, normed,
        num_rows, change.numel() // width, width, eps, limit or 0.0,
        IS_LIMITED=limit is not None, ROWS=_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return total, normed


# Compiled once, whatever the number of rows.
@triton.jit(do_not_specialize=["num_rows", "num_changes"])  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, change, weight, bias, total, normed,
    num_rows, num_changes, width, eps, limit,
    IS_LIMITED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.arange(0, BLOCK)
    within = n < width
    inside = (rows < num_rows)[:, None] & within[None, :]
    place = rows[:, None] * width + n[None, :]
    of_change = (rows % num_changes)[:, None] * width + n[None, :]
    y = tl.load(x + place, inside, other=0.0).to(tl.float32)
    y += tl.load(change + of_change, inside, other=0.0).to(tl.float32)
    if IS_LIMITED:
        y = tl.clamp(y, -limit, limit, propagate_nan=tl.PropagateNan.ALL)  # it must be seen, not limited
    rounded = y.to(total.dtype.element_ty)
    tl.store(total + place, rounded, inside)
    y = rounded.to(tl.float32)  # the norm is of what is stored, as torch's is
    mean = tl.sum(y, 1) / width
    centred = tl.where(within[None, :], y - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    y = centred * scale[:, None]
    y *= tl.load(weight + n, within, other=0.0).to(tl.float32)[None, :]
    y += tl.load(bias + n, within, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + place, y.to(normed.dtype.element_ty), inside)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, D] as 8-bit floats, and float32 scales [rows, 1]."""
    assert x.is_contiguous()
    num_rows, width = x.shape
    quantised = torch.empty_like(x, dtype=FP8)
    scales = torch.empty(num_rows, 1, device=x.device)
    _quantise_rows[triton.cdiv(num_rows, _ROWS),](
        x, quantised, scales, num_rows, width,
        LARGEST=LARGEST, TINY=TINY, ROWS=_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return quantised, scales


# Compiled once, whatever the number of rows.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _quantise_rows(  # type: ignore[no-untyped-def]
    x, quantised, scales, num_rows, width,
    LARGEST: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (n < width)[None, :]
    place = rows[:, None] * width + n[None, :]
    y = tl.load(x + place, inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 1), TINY) / LARGEST
    tl.store(scales + rows, scale, rows < num_rows)
    tl.store(quantised + place, (y / scale[:, None]).to(quantised.dtype.element_ty), inside)
