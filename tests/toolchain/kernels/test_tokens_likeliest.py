"""The kernel at the end of a step against the rules, argmax and log-softmax of torch: the same tokens.

Under Triton's interpreter; on a GPU compiled.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asr_server.engine.slots import SlotState
from asr_server.engine.tokens import GenerationRules, TokenRules, choose_likeliest
from asr_server.model.kernels import TORCH, choose_token
from asr_server.model.kernels.choice import triton_kernels

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = triton_kernels()
VOCABULARY, END_OF_TEXT, FIRST_TIME = 300, 190, 200
SPECIALS: Any = SimpleNamespace(end_of_text=END_OF_TEXT, no_timestamps=199, timestamp_begin=FIRST_TIME)
ROWS = 24
COUNT = 6  # candidates of a beam of 5


def random_state() -> SlotState:
    """Rows at their beginning, after text, after one time and after two."""
    state = SlotState.empty(ROWS, 8, DEVICE)
    state.active.fill_(1)
    state.num_generated.copy_(torch.arange(ROWS) % 3)
    for column in (state.token, state.previous):
        texts, times = torch.randint(0, 180, (ROWS,)), torch.randint(FIRST_TIME, 280, (ROWS,))
        column.copy_(torch.where(torch.rand(ROWS) < 0.5, texts, times))
    state.last_time.copy_(torch.where(state.token >= FIRST_TIME, state.token, 205))
    state.last_time[state.num_generated == 0] = FIRST_TIME - 1
    return state


@pytest.mark.parametrize(("max_initial", "seed"), [(50, 0), (None, 1)])
def test_the_kernel_chooses_the_tokens_that_torch_chooses(
    max_initial: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_token, "_BLOCK", 128)  # several blocks, of which the last is not full
    torch.manual_seed(seed)
    rules = TokenRules(
        GenerationRules((1, 5, 195, 196), (2, END_OF_TEXT), max_initial), SPECIALS, VOCABULARY, DEVICE
    )
    state = random_state()
    stored = torch.full(
        (ROWS, 384), 99.0, device=DEVICE
    )  # rows lie further apart than the vocabulary is long
    scores = stored[:, :VOCABULARY]
    scores.copy_(torch.randn(ROWS, VOCABULARY) * 4)
    scores[:, FIRST_TIME:] -= torch.rand(ROWS, 1).to(DEVICE) * 12
    scores[:, 30:34] = 30 * (torch.rand(ROWS, 1) < 0.2).to(DEVICE)  # ties, of which the first counts
    found, expected = torch.zeros(2, ROWS, dtype=torch.long, device=DEVICE).unbind()
    logprobs, expected_logprobs = torch.zeros(2, ROWS, device=DEVICE).unbind()
    candidates, expected_candidates = torch.zeros(2, 2 * COUNT, ROWS, device=DEVICE).unbind()
    before = scores.clone()
    choose_likeliest(TRITON, rules, scores, state, found, logprobs, candidates)
    assert torch.equal(scores, before)
    choose_likeliest(TORCH, rules, scores, state, expected, expected_logprobs, expected_candidates)
    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    assert 0 < (found >= FIRST_TIME).sum() < ROWS
    likeliest, of_likeliest = candidates.chunk(2)
    assert likeliest[0].tolist() == expected.tolist()
    torch.testing.assert_close(of_likeliest, expected_candidates[COUNT:], atol=1e-5, rtol=0)
    allowed = scores.log_softmax(-1).gather(1, likeliest.t().long()).t()  # scores are by the rules now
    torch.testing.assert_close(of_likeliest, allowed, atol=1e-5, rtol=0)
    assert all(len(set(column)) == COUNT for column in likeliest.t().tolist())
    is_tied = of_likeliest.diff(dim=0) == 0
    assert is_tied.any()
    assert (likeliest.diff(dim=0)[is_tied] > 0).all(), "the first of equal ones comes first"
