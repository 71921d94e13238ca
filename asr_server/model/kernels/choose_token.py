"""The end of a decode step: choose each row's token, its log-probability and a beam's candidates; then
update the slots' columns.

Must agree token for token with `engine/tokens.py` and with `engine/slots.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # scores that are read at once
# Rows of `SlotState.integers`; the tokens after the prompt begin with the last one.
_ACTIVE, _TOKEN, _PREVIOUS, _POSITION, _NUM_GENERATED, _LAST_TIME, _GENERATED = map(
    tl.constexpr, (0, 1, 2, 3, 4, 5, 8)
)


def choose_token(
    scores: Tensor,  # float32 [B, vocabulary]; rows may be padded. Aligned to 16, loads are wide
    suppressed: Tensor,  # int8 [vocabulary or more]: 1 always, 2 as the first token
    integers: Tensor,  # [any, B], of `SlotState`
    end_of_text: int,
    first_time: int,
    last_initial_time: int,
    tokens: Tensor,
    logprobs: Tensor,
    candidates: Tensor,  # float32 [2 * count, B], or empty
) -> None:
    """Write each row's likeliest token and log-probability, [B]. A graph may record it.

    Candidates get a line for each likely token, the first of equals first, then one for each log-probability.
    Rows that are not active are neither read nor written.
    """
    assert scores.stride(1) == 1
    assert not len(candidates) or candidates.stride(1) == 1
    _choose[len(scores),](
        scores, suppressed, integers, tokens, logprobs, candidates,
        scores.stride(0), len(suppressed), scores.shape[1], integers.stride(0), candidates.stride(0),
        end_of_text, first_time, last_initial_time,
        COUNT=len(candidates) // 2, BLOCK=_BLOCK,
        NUM_BLOCKS=triton.next_power_of_2(triton.cdiv(scores.shape[1], _BLOCK)), num_warps=16,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    scores, suppressed, integers, tokens, logprobs, candidates,
    row_stride, num_suppressed, vocabulary, stride, line_stride, end_of_text, first_time, last_initial_time,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = integers + row
    is_active = tl.load(slot + stride * _ACTIVE) != 0
    token, previous = tl.load(slot + stride * _TOKEN), tl.load(slot + stride * _PREVIOUS)
    last_time = tl.load(slot + stride * _LAST_TIME).to(tl.int32)
    generated = tl.load(slot + stride * _NUM_GENERATED).to(tl.int32)
    begin = generated == 0
    after_time = (generated > 0) & (token >= first_time)
    after_two = after_time & ((generated < 2) | (previous >= first_time))
    after_one = after_time & (after_two == 0)
    earliest = last_time + tl.where(after_one, 0, 1)
    cases = 1 + tl.where(begin, 2, 0)  # bits of `suppressed` that count here
    # Other tokens are allowed from `first` to `end`, times from `first_allowed` to `time_end`.
    first = tl.where(after_one, end_of_text, 0)
    end = tl.where(is_active, first_time, 0)
    first_allowed = tl.maximum(earliest, first_time)
    time_end = tl.where(begin, tl.minimum(last_initial_time + 1, vocabulary), vocabulary)
    time_end = tl.where(is_active & (after_two == 0), time_end, 0)

    # Times and other tokens apart, because it is decided at the end whether it has to be a time.
    scores += row.to(tl.int64) * row_stride
    others, other_of_lane, sum_others = _scan(
        scores, suppressed, first, end, row_stride, num_suppressed, cases, BLOCK
    )
    times, time_of_lane, sum_times = _scan(
        scores, suppressed, first_allowed, time_end, row_stride, num_suppressed, cases, BLOCK
    )
    best_other, other = _first_of_best(others, other_of_lane)
    best_time, time = _first_of_best(times, time_of_lane)
    # Where all times together are likelier than any one other token, a time it is.
    log_times = tl.where(sum_times > 0, best_time + tl.log(tl.maximum(sum_times, 1e-30)), float("-inf"))
    must_be_time = begin | (log_times > best_other)
    take_time = must_be_time | (best_time > best_other)
    best = tl.maximum(tl.where(take_time, best_time, best_other), -1e30)
    of_others = tl.where(must_be_time, 0.0, sum_others * tl.exp(tl.minimum(best_other - best, 0.0)))
    total = of_others + sum_times * tl.exp(best_time - best)
    logprob = -tl.log(tl.maximum(total, 1e-30))
    tl.store(tokens + row, tl.where(take_time, time, other).to(tokens.dtype.element_ty), is_active)
    tl.store(logprobs + row, logprob, is_active)

    if COUNT > 0:
        end = tl.where(must_be_time, 0, end)
        others = tl.where(must_be_time, float("-inf"), others)
        token_of_lane = tl.where(times > others, time_of_lane, other_of_lane)
        offset = tl.where(logprob <= 1, logprob - best, float("nan"))  # above: a score is NaN
        _write_candidates(
            scores, suppressed, tl.maximum(times, others), token_of_lane, offset, candidates + row, is_active,
            first, end, first_allowed, time_end, row_stride, num_suppressed, cases, line_stride,
            COUNT, BLOCK, NUM_BLOCKS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]
    scores, suppressed, first, end, row_stride, num_suppressed, cases, BLOCK: tl.constexpr
):
    """Return each lane's best score and token between `first` and `end`, and the sum of exp(score - best).

    Lanes stay apart until the end: threads that wait would leave the memory idle.
    """
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    token = tl.full([BLOCK], 0, tl.int32)
    for start in range(first // BLOCK * BLOCK, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        score = _allowed(scores, suppressed, n, (n >= first) & (n < end), row_stride, num_suppressed, cases)
        token = tl.where(score > best, n, token)
        reached = tl.maximum(best, score)
        finite = tl.maximum(reached, -1e30)  # of a difference from minus infinity nothing would come
        total = total * tl.exp(best - finite) + tl.exp(score - finite)
        best = reached
    highest = tl.maximum(tl.max(best, 0), -1e30)
    return best, token, tl.sum(total * tl.exp(best - highest), 0)


@triton.jit
def _allowed(scores, suppressed, n, inside, row_stride, num_suppressed, cases):  # type: ignore[no-untyped-def]
    # The masks are those that leave loads wide: what is behind the vocabulary is off all the same.
    score = tl.load(scores + n, n < row_stride, other=float("-inf"))
    off = (tl.load(suppressed + n, n < num_suppressed, other=0).to(tl.int32) & cases) != 0
    return tl.where(inside & (off == 0), score, float("-inf"))


@triton.jit
def _first_of_best(best, token):  # type: ignore[no-untyped-def]
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, token, 0x7FFFFFFF), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _write_candidates(  # type: ignore[no-untyped-def]
    scores, suppressed, best, token, offset, candidates, is_active,
    first, end, first_time, time_end, row_stride, num_suppressed, cases, line_stride,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    for rank in range(COUNT):
        highest, found = _first_of_best(best, token)
        tl.store(candidates + rank * line_stride, found.to(tl.float32), is_active)
        tl.store(candidates + (COUNT + rank) * line_stride, highest + offset, is_active)
        lane = found % BLOCK
        n = lane + BLOCK * tl.arange(0, NUM_BLOCKS)
        inside = ((n >= first) & (n < end)) | ((n >= first_time) & (n < time_end))
        score = _allowed(scores, suppressed, n, inside, row_stride, num_suppressed, cases)
        is_behind = (score < highest) | ((score == highest) & (n > found))
        next_best, next_token = _first_of_best(tl.where(is_behind, score, float("-inf")), n)
        is_lane = tl.arange(0, BLOCK) == lane
        best, token = tl.where(is_lane, next_best, best), tl.where(is_lane, next_token, token)


_ROWS = 64  # of a program


def advance(
    tokens: Tensor,  # [B]
    logprobs: Tensor,
    no_speech: Tensor,
    integers: Tensor,  # [rows, B], of `SlotState`
    candidates: Tensor,  # [lines, B]
    first_time: int,
    end_of_text: int,
    report: Tensor,  # float64 [3 + lines, B]
) -> None:
    """Append a token to every row, as `SlotState.advance` does, and write the step's report."""
    assert report.is_contiguous()
    last_position = len(integers) - _GENERATED.value - 1
    _advance[triton.cdiv(len(tokens), _ROWS),](
        tokens, logprobs, no_speech, integers, candidates, report,
        len(tokens), last_position, integers.stride(0), candidates.stride(0), first_time, end_of_text,
        LINES=len(candidates), ROWS=_ROWS, num_warps=2,
    )  # fmt: skip


# Compiled once, whatever the number of rows.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    tokens, logprobs, no_speech, integers, candidates, report,
    num_rows, last_position, stride, line_stride, first_time, end_of_text,
    LINES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    chosen = tl.load(tokens + row, inside, other=0)
    logprob = tl.load(logprobs + row, inside, other=0.0)
    silence = tl.load(no_speech + row, inside, other=0.0)
    tl.store(report + row, chosen.to(tl.float64), inside)
    tl.store(report + num_rows + row, logprob.to(tl.float64), inside)
    tl.store(report + 2 * num_rows + row, silence.to(tl.float64), inside)
    for line in range(LINES):
        candidate = tl.load(candidates + line * line_stride + row, inside, other=0.0)
        tl.store(report + (3 + line) * num_rows + row, candidate.to(tl.float64), inside)

    slot = integers + row
    is_active = (tl.load(slot + stride * _ACTIVE, inside, other=0) != 0) & (chosen != end_of_text)
    tl.store(slot + stride * _ACTIVE, is_active.to(tl.int64), inside)
    tl.store(slot + stride * _PREVIOUS, tl.load(slot + stride * _TOKEN, inside, other=0), inside)
    tl.store(slot + stride * _TOKEN, chosen, inside)
    time = tl.load(slot + stride * _LAST_TIME, inside, other=0)
    tl.store(slot + stride * _LAST_TIME, tl.where(chosen >= first_time, chosen, time), inside)
    count = tl.load(slot + stride * _NUM_GENERATED, inside, other=0)
    tl.store(slot + stride * (tl.minimum(count, last_position) + _GENERATED), chosen, inside)
    tl.store(slot + stride * _NUM_GENERATED, count + 1, inside)
    # A slot that is held may run on; it must not run over.
    position = tl.load(slot + stride * _POSITION, inside, other=0) + 1
    tl.store(slot + stride * _POSITION, tl.minimum(position, last_position), inside)
