"""The end of a decode step in one pass over the scores: rules, the likeliest token, its log-probability.

`engine/rules.py` has the rules, with which this must agree token for token. The scores stay as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # scores that are read at once


def choose_token(
    scores: Tensor,
    suppressed: Tensor,
    active: Tensor,
    timestamps: Tensor,
    num_generated: Tensor,
    token: Tensor,
    previous: Tensor,
    last_time: Tensor,
    end_of_text: int,
    first_time: int,
    last_initial_time: int,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    """Writes each row's likeliest token and its log-probability to `tokens` and `logprobs` [B].

    A graph may record it: what is launched depends on shapes alone, the rows' state is read on the device.

    Args:
        scores: float32 [B, vocabulary]; rows may lie further apart than that; what is between them is
            read but never chosen, and loads are wide where they begin at multiples of 16.
        suppressed: int8 [vocabulary, or more], when a token is: 1 always, 2 as the first, 4 with times.
        active: bool [B]; of other rows nothing is read, and nothing is written.
        timestamps, num_generated, token, previous, last_time: [B], columns of the slots.
        end_of_text, first_time, last_initial_time: tokens.
    """
    assert scores.stride(1) == 1
    _choose[len(scores),](
        scores,
        suppressed,
        active,
        timestamps,
        num_generated,
        token,
        previous,
        last_time,
        tokens,
        logprobs,
        scores.stride(0),
        len(suppressed),
        scores.shape[1],
        end_of_text,
        first_time,
        last_initial_time,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    scores,
    suppressed,
    active,
    timestamps,
    num_generated,
    token,
    previous,
    last_time,
    tokens,
    logprobs,
    row_stride,
    num_suppressed,
    vocabulary,
    end_of_text,
    first_time,
    last_initial_time,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_active = tl.load(active + row).to(tl.int1)
    wanted = tl.load(timestamps + row).to(tl.int1)
    generated = tl.load(num_generated + row)
    begin = generated == 0
    at_first = wanted & begin
    after_time = wanted & (generated > 0) & (tl.load(token + row) >= first_time)
    after_two = after_time & ((generated < 2) | (tl.load(previous + row) >= first_time))
    after_one = after_time & (after_two == 0)
    earliest = tl.load(last_time + row) + tl.where(after_one, 0, 1)
    # Bits of `suppressed` that count here: always, at the beginning, where times are wanted.
    cases = 1 + tl.where(begin, 2, 0) + tl.where(wanted, 4, 0)

    # Times and other tokens apart, because it is decided at the end whether it has to be a time.
    scores += row.to(tl.int64) * row_stride
    best_other = tl.full([], float("-inf"), tl.float32)
    best_time = tl.full([], float("-inf"), tl.float32)
    sum_others = tl.full([], 0.0, tl.float32)
    sum_times = tl.full([], 0.0, tl.float32)
    other = tl.full([], 0, tl.int32)
    time = tl.full([], 0, tl.int32)
    for start in range(0, tl.where(is_active, vocabulary, 0), BLOCK):
        n = start + tl.arange(0, BLOCK)
        # The masks are those that leave loads wide: what is behind the vocabulary is off all the same.
        score = tl.load(scores + n, n < row_stride, other=float("-inf"))
        off = (tl.load(suppressed + n, n < num_suppressed, other=0).to(tl.int32) & cases) != 0
        off |= n >= vocabulary
        is_time = n >= first_time
        off |= (n < end_of_text) & after_one
        off |= is_time & wanted & ((n < earliest) | after_two | (begin & (n > last_initial_time)))
        score = tl.where(off, float("-inf"), score)
        others = tl.where(is_time, float("-inf"), score)
        times = tl.where(is_time, score, float("-inf"))

        highest = tl.max(others, 0)
        other = tl.where(highest > best_other, start + tl.argmax(others, 0), other)
        reached = tl.maximum(best_other, highest)
        finite = tl.maximum(reached, -1e30)  # of a difference from minus infinity nothing would come
        sum_others = sum_others * tl.exp(best_other - finite) + tl.sum(tl.exp(others - finite), 0)
        best_other = reached

        highest = tl.max(times, 0)
        time = tl.where(highest > best_time, start + tl.argmax(times, 0), time)
        reached = tl.maximum(best_time, highest)
        finite = tl.maximum(reached, -1e30)
        sum_times = sum_times * tl.exp(best_time - finite) + tl.sum(tl.exp(times - finite), 0)
        best_time = reached

    # Where all times together are likelier than any one other token, a time it is.
    log_times = tl.where(sum_times > 0, best_time + tl.log(tl.maximum(sum_times, 1e-30)), float("-inf"))
    must_be_time = at_first | (wanted & (log_times > best_other))
    take_time = must_be_time | (best_time > best_other)
    chosen = tl.where(take_time, time, other)
    best = tl.maximum(tl.where(take_time, best_time, best_other), -1e30)
    of_others = tl.where(must_be_time, 0.0, sum_others * tl.exp(tl.minimum(best_other - best, 0.0)))
    total = of_others + sum_times * tl.exp(best_time - best)
    tl.store(tokens + row, chosen.to(tokens.dtype.element_ty), is_active)
    tl.store(logprobs + row, -tl.log(tl.maximum(total, 1e-30)), is_active)
