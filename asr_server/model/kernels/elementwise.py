"""Triton kernels that read and write a tensor once: addition with layer norm, and storing audio in slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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


_TILE = 64  # rows and columns that a program copies


def store_audio(source: Tensor, slots: Tensor, target: Tensor) -> None:
    """Copy source [B, H, n, m] to target[slots, :, :n, :m]; m is innermost in both.

    Args:
        source: a first dimension of stride 0 repeats.
        slots: int64 [B].
    """
    assert source.stride(3) == target.stride(3) == slots.stride(0) == 1
    batch, heads, num_rows, num_columns = source.shape
    grid = batch * heads, triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE)
    _store_audio[grid](
        source, slots, target, *source.stride()[:3], *target.stride()[:3], heads, num_rows, num_columns,
        TILE=_TILE, num_warps=8,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _store_audio(  # type: ignore[no-untyped-def]
    source, slots, target,
    source_stride, source_head_stride, source_row_stride,
    target_stride, target_head_stride, target_row_stride,
    heads, num_rows, num_columns, TILE: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    slot = tl.load(slots + chunk)
    source += chunk.to(tl.int64) * source_stride + head * source_head_stride
    target += slot * target_stride + head * target_head_stride
    copied = tl.load(source + row[:, None] * source_row_stride + column[None, :], inside)
    tl.store(target + row[:, None] * target_row_stride + column[None, :], copied, inside)
