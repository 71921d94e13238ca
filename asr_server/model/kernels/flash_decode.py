"""Attention of single queries over the cache, read in place, with the softmax in float32.

After flash decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): keys are split into
shares, each with its own maximum; a second kernel joins them. Must agree with `layers.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # positions that are read at once
_ENOUGH_PROGRAMS = 512  # keep a GPU busy without splitting: 4 on each multiprocessor of an H100
_MAX_SPLITS = 16
_FEW_ROWS, _WARPS_OF_FEW = 8, 4
# In 16 bits one warp was the fastest with many rows: 0.120 ms beside 0.150 and 0.204. float32 needs two.
_WARPS_OF_MANY = {2: 1, 4: 2}


def flash_decode(
    query: Tensor,  # [R, H, d], scaled; d is a power of two
    keys: Tensor,  # [slots, H, n, d]; if n is innermost, rows are aligned to 16 elements
    values: Tensor,  # [slots, H, n, d], d innermost
    slots: Tensor,  # [R]
    lengths: Tensor,  # [R], positions to read; 0 gives zero
    most: int,  # upper bound of the lengths
    new_keys: Tensor | None = None,  # [R, H, d], to be stored at each row's last position
    new_values: Tensor | None = None,
) -> Tensor:
    """Attend from each row to its slot's first positions, to [R, H, d]. A graph may record it.

    With new keys slots must differ, n is not innermost, and keys are not split.
    """
    assert slots.is_contiguous()
    assert lengths.is_contiguous()
    assert query.stride(2) == values.stride(3) == 1
    num_rows, num_heads, depth = query.shape
    has_new = new_keys is not None and new_values is not None
    num_splits, split = (1, most) if has_new else plan_splits(num_rows * num_heads, most)
    result = torch.empty_like(query)
    # With one part the first kernel writes the result itself, and these stand in for what it does not touch.
    parts = sums = maxima = result
    if num_splits > 1:
        parts = query.new_empty(num_splits, num_rows, num_heads, depth, dtype=torch.float32)
        sums, maxima = query.new_empty(2, num_splits, num_rows, num_heads, dtype=torch.float32).unbind()
    transposed = keys.stride(2) == 1
    if new_keys is None or new_values is None:
        new_keys = new_values = result  # stands in here, too
    assert new_keys.stride() == new_values.stride()
    assert not (has_new and transposed)
    _attend[num_heads, num_rows, num_splits](
        query, keys, values, slots, lengths, new_keys, new_values,
        result if num_splits == 1 else parts, sums, maxima,
        *query.stride()[:2],
        *keys.stride()[:2], keys.stride(3) if transposed else keys.stride(2),
        *values.stride()[:3],
        *new_keys.stride()[:2],
        num_heads, split,
        DEPTH=depth, BLOCK=_BLOCK, CAPACITY=keys.stride(3) if transposed else 0,
        IS_SPLIT=num_splits > 1, HAS_NEW=has_new,
        num_warps=_WARPS_OF_FEW if num_rows <= _FEW_ROWS else _WARPS_OF_MANY[keys.element_size()],
    )  # fmt: skip
    if num_splits > 1:
        _combine[num_heads, num_rows](
            parts, sums, maxima, result, num_rows, num_heads, num_splits,
            MAX_SPLITS=_MAX_SPLITS, DEPTH=depth, num_warps=1,
        )  # fmt: skip
    return result


_ROWS = 64  # of a program of `row_lengths`


def row_lengths(
    slots: slice, positions: Tensor, active: Tensor, audio_of: Tensor, num_audio: int
) -> tuple[Tensor, ...]:
    """Return the rows of a step in one launch, as `model/rows.py` does.

    Positions are int64 [B, 1], `active` is [B] of any integers, `audio_of` int64 of the cache's slots.
    """
    num_rows = len(positions)
    assert positions.stride(0) == active.stride(0) == 1
    found = positions.new_empty(4, num_rows)
    _row_lengths[triton.cdiv(num_rows, _ROWS),](
        positions, active, audio_of, found, slots.start, num_rows, num_audio, ROWS=_ROWS, num_warps=2
    )
    return found.unbind()


# Compiled once, whatever the slots and the number of rows.
@triton.jit(do_not_specialize=["first_slot", "num_rows"])  # type: ignore[untyped-decorator]
def _row_lengths(  # type: ignore[no-untyped-def]
    positions, active, audio_of, found, first_slot, num_rows, num_audio, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    is_active = tl.load(active + row, inside, other=0) != 0
    tl.store(found + row, (first_slot + row).to(tl.int64), inside)
    tl.store(found + num_rows + row, tl.load(audio_of + first_slot + row, inside, other=0), inside)
    text = tl.where(is_active, tl.load(positions + row, inside, other=0) + 1, 0)
    tl.store(found + 2 * num_rows + row, text, inside)
    tl.store(found + 3 * num_rows + row, tl.where(is_active, num_audio, 0).to(tl.int64), inside)


def plan_splits(num_programs: int, most: int) -> tuple[int, int]:
    blocks = triton.cdiv(most, _BLOCK)
    wanted = min(triton.cdiv(_ENOUGH_PROGRAMS, num_programs), triton.cdiv(blocks, 2), _MAX_SPLITS)
    blocks_of_part = triton.cdiv(blocks, wanted)
    return triton.cdiv(blocks, blocks_of_part), blocks_of_part * _BLOCK


# Compiled once, whether the number of rows is even or not.
@triton.jit(do_not_specialize_on_alignment=["slots", "lengths"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, slots, lengths, new_keys, new_values,
    result, sums, maxima,
    query_row_stride, query_head_stride,
    key_slot_stride, key_head_stride, key_stride,
    value_slot_stride, value_head_stride, value_stride,
    new_row_stride, new_head_stride,
    num_heads, split,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    first = part * split
    length = tl.load(lengths + row).to(tl.int32)
    last = tl.minimum(length, first + split)
    dims = tl.arange(0, DEPTH)
    q = tl.load(query + row * query_row_stride + head * query_head_stride + dims).to(tl.float32)
    keys += slot * key_slot_stride + head * key_head_stride
    values += slot * value_slot_stride + head * value_head_stride

    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sum_of_values = tl.zeros([DEPTH], tl.float32)
    if HAS_NEW:  # of the last position, which is not read from the cache
        last = length - 1
        is_active = length > 0
        new = row * new_row_stride + head * new_head_stride + dims
        new_key, new_value = tl.load(new_keys + new), tl.load(new_values + new)
        is_stored = dims < tl.where(is_active, DEPTH, 0)
        tl.store(keys + last * key_stride + dims, new_key, is_stored)
        tl.store(values + last * value_stride + dims, new_value, is_stored)
        maximum = tl.where(is_active, tl.sum(new_key.to(tl.float32) * q, 0), maximum)
        total = tl.where(is_active, 1.0, total)
        sum_of_values = tl.where(is_stored, new_value.to(tl.float32), sum_of_values)
    for start in range(first, last, BLOCK):
        n = start + tl.arange(0, BLOCK)
        # Both loads come first: in what follows threads wait for each other, and the memory must not wait.
        if CAPACITY:  # [d, n] in memory: the mask is one that leaves the loads wide
            k = tl.load(keys + dims[:, None] * key_stride + n[None, :], (n < CAPACITY)[None, :], other=0.0)
        else:
            k = tl.load(keys + n[:, None] * key_stride + dims[None, :], (n < last)[:, None], other=0.0)
        v = tl.load(values + n[:, None] * value_stride + dims[None, :], (n < last)[:, None], other=0.0)
        if CAPACITY:
            scores = tl.sum(k.to(tl.float32) * q[:, None], 0)
        else:
            scores = tl.sum(k.to(tl.float32) * q[None, :], 1)
        scores = tl.where(n < last, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights = tl.exp(scores - new_maximum)
        old = tl.exp(maximum - new_maximum)
        sum_of_values = sum_of_values * old + tl.sum(v.to(tl.float32) * weights[:, None], 0)
        total = total * old + tl.sum(weights, 0)
        maximum = new_maximum

    place = row * num_heads + head
    if IS_SPLIT:
        place += part * tl.num_programs(1) * num_heads
        tl.store(sums + place, total)
        tl.store(maxima + place, maximum)
    else:
        sum_of_values /= tl.where(total > 0, total, 1.0)  # nothing was looked at: zero
    tl.store(result + place * DEPTH + dims, sum_of_values.to(result.dtype.element_ty))


# Compiled once, whatever the number of rows and of parts.
@triton.jit(do_not_specialize=["num_rows", "num_splits"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    parts, sums, maxima, result, num_rows, num_heads, num_splits,
    MAX_SPLITS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1) * num_heads + tl.program_id(0)
    number = tl.arange(0, MAX_SPLITS)
    is_part = number < num_splits
    of_parts = place + number * num_rows * num_heads
    dims = tl.arange(0, DEPTH)
    maximum = tl.load(maxima + of_parts, is_part, other=float("-inf"))
    share = tl.exp(maximum - tl.maximum(tl.max(maximum, 0), -1e30))  # finite, also where nothing was seen
    total = tl.sum(tl.load(sums + of_parts, is_part, other=0.0) * share, 0)
    part = tl.load(parts + of_parts[:, None] * DEPTH + dims[None, :], is_part[:, None], other=0.0)
    attended = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(result + place * DEPTH + dims, attended.to(result.dtype.element_ty))
