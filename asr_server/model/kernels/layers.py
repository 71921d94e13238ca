"""Triton kernels of layers: addition with norm, products of one row, and storing audio in slots.

A step of one row is a chain of small kernels: each one saved is a wait less. Must agree with `whisper.py`.
"""

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
    rounded = _sum(x + place, change + of_change, inside, limit, IS_LIMITED)
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


# Products of one row: reading the weights is their time.
_OUTPUTS = 4, 8  # of a program, where there are few in all and where there are many
_WEIGHTS = 4096  # weights that a program reads at once
_ENOUGH_PROGRAMS = 320  # more than two on each multiprocessor of an H100


def norm_product(
    x: Tensor,  # [..., D], contiguous; a row for each program, so best a single one
    change: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    limit: float | None,  # greatest number of the sum; None: no limit
    weight: Tensor,  # [N, D]
    bias: Tensor,  # [N]
    gelu: bool,
) -> tuple[Tensor, Tensor]:
    """Return x + change, and the product of its layer norm with `weight`."""
    assert x.is_contiguous()
    assert change.is_contiguous()
    total, result = torch.empty_like(x), x.new_empty(*x.shape[:-1], len(weight))
    _launch(
        x, weight, bias, result, change, norm_weight, norm_bias, total, eps, limit or 0.0,
        HAS_NORM=True, IS_LIMITED=limit is not None, HAS_GELU=gelu,
    )  # fmt: skip
    return total, result


def row_product(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """Return x W^T + b for x [..., D], contiguous."""
    assert x.is_contiguous()
    result = x.new_empty(*x.shape[:-1], len(weight))
    stand_ins = x, bias, bias, result  # for what only a norm reads and writes
    _launch(
        x, weight, bias, result, *stand_ins, 0.0, 0.0,
        HAS_NORM=False, IS_LIMITED=False, HAS_GELU=gelu,
    )  # fmt: skip
    return result


def _launch(x: Tensor, weight: Tensor, *arguments: Tensor | float, **flags: bool) -> None:
    assert weight.is_contiguous()
    num_outputs, num_inputs = weight.shape
    outputs = _OUTPUTS[num_outputs >= _OUTPUTS[1] * _ENOUGH_PROGRAMS]
    grid = triton.cdiv(num_outputs, outputs), x.numel() // num_inputs
    width = triton.next_power_of_2(num_inputs) if flags["HAS_NORM"] else 1  # else compiled for each
    _product[grid](
        x, weight, *arguments, num_inputs, num_outputs,
        **flags, WIDTH=width, OUTPUTS=outputs, INPUTS=_WEIGHTS // outputs, num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, weight, bias, result, change, norm_weight, norm_bias, total, eps, limit, num_inputs, num_outputs,
    HAS_NORM: tl.constexpr, IS_LIMITED: tl.constexpr, HAS_GELU: tl.constexpr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1).to(tl.int64) * num_inputs
    if HAS_NORM:
        mean, scale = _add(x + row, change + row, total + row, num_inputs, eps, limit, IS_LIMITED, WIDTH)
    products = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        n = start + tl.arange(0, INPUTS)
        inside = n < num_inputs
        of_weight = output.to(tl.int64)[:, None] * num_inputs + n[None, :]
        w = tl.load(weight + of_weight, (output < num_outputs)[:, None] & inside[None, :], other=0.0)
        if HAS_NORM:
            added = _sum(x + row + n, change + row + n, inside, limit, IS_LIMITED)
            y = (added.to(tl.float32) - mean) * scale
            y *= tl.load(norm_weight + n, inside, other=0.0).to(tl.float32)
            y += tl.load(norm_bias + n, inside, other=0.0).to(tl.float32)
            y = y.to(result.dtype.element_ty)
        else:
            y = tl.load(x + row + n, inside, other=0.0)
        products += w.to(tl.float32) * y.to(tl.float32)[None, :]
    found = tl.sum(products, 1) + tl.load(bias + output, output < num_outputs, other=0.0).to(tl.float32)
    if HAS_GELU:
        found = 0.5 * found * (1.0 + tl.erf(found * 0.7071067811865476))
    place = tl.program_id(1).to(tl.int64) * num_outputs + output
    tl.store(result + place, found.to(result.dtype.element_ty), output < num_outputs)


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    x, change, total, num_inputs, eps, limit, IS_LIMITED: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the sum, in the first program of a row; return what its norm subtracts and multiplies by."""
    n = tl.arange(0, WIDTH)
    inside = n < num_inputs
    rounded = _sum(x + n, change + n, inside, limit, IS_LIMITED)
    tl.store(total + n, rounded, inside & (tl.program_id(0) == 0))
    y = rounded.to(tl.float32)  # the norm is of what is stored, as torch's is
    mean = tl.sum(y, 0) / num_inputs
    centred = tl.where(inside, y - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 0) / num_inputs + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(x, change, inside, limit, IS_LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]
    y = tl.load(x, inside, other=0.0).to(tl.float32)
    y += tl.load(change, inside, other=0.0).to(tl.float32)
    if IS_LIMITED:
        y = tl.clamp(y, -limit, limit, propagate_nan=tl.PropagateNan.ALL)  # it must be seen, not limited
    return y.to(x.dtype.element_ty)
