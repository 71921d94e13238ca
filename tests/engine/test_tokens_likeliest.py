"""The kernel at the end of a step against the rules, argmax and log-softmax of torch: the same tokens.

Under Triton's interpreter; on a GPU compiled.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asr_server.engine.slots import SlotState
from asr_server.engine.tokens import GenerationRules, TokenRules, candidates, choose_likeliest
from asr_server.model.kernels import TORCH, Kernels, choose_token
from asr_server.model.kernels.candidates import choose_kernels
from asr_server.model.kernels.table import choose, judge
from tests.engine.device_stand_ins import take_few_programs

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, END_OF_TEXT, FIRST_TIME = 300, 190, 200
SPECIALS: Any = SimpleNamespace(end_of_text=END_OF_TEXT, no_timestamps=199, timestamp_begin=FIRST_TIME)
TRITON = choose_kernels("triton", None, DEVICE, torch.float32).kernels  # type: ignore[arg-type]
FORMS = [replace(TORCH, choose_token=form) for form in (TRITON.choose_token, TRITON.choose_token_few)]
in_both_forms = pytest.mark.parametrize("kernels", FORMS, ids=["whole", "in parts"])
ROWS = 24
COUNT = 6  # candidates of a beam of 5


def random_state() -> SlotState:
    """Rows at their beginning, after text, after one time and after two."""
    state = SlotState.empty(ROWS, 8, DEVICE)
    state.active.fill_(True)
    state.num_generated.copy_(torch.arange(ROWS) % 3)
    for column in (state.token, state.previous):
        texts, times = torch.randint(0, 180, (ROWS,)), torch.randint(FIRST_TIME, 280, (ROWS,))
        column.copy_(torch.where(torch.rand(ROWS) < 0.5, texts, times))
    state.last_time.copy_(torch.where(state.token >= FIRST_TIME, state.token, 205))
    state.last_time[state.num_generated == 0] = FIRST_TIME - 1
    return state


@in_both_forms
@pytest.mark.parametrize(("max_initial", "seed"), [(50, 0), (None, 1)])
def test_the_kernel_chooses_the_tokens_that_torch_chooses(
    kernels: Kernels, max_initial: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_token, "_BLOCK", 128)  # several blocks, of which the last is not full
    monkeypatch.setattr(choose_token, "_PART_BLOCK", 32)  # several in a part
    monkeypatch.setattr(choose_token, "_PARTS", 4)
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
    choose_likeliest(kernels, rules, scores, state, found, logprobs, candidates)
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


@in_both_forms
def test_tokens_of_which_few_are_possible_are_followed_by_impossible_ones(kernels: Kernels) -> None:
    state = SlotState.empty(1, 8, DEVICE)
    state.active.fill_(True)
    state.last_time.fill_(FIRST_TIME - 1)
    rules = TokenRules(GenerationRules((), (), 2), SPECIALS, VOCABULARY, DEVICE)
    candidates = torch.zeros(2 * COUNT, 1, device=DEVICE)
    scores = torch.arange(float(VOCABULARY), device=DEVICE)[None]
    tokens, logprobs = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.zeros(1, device=DEVICE)
    choose_likeliest(kernels, rules, scores, state, tokens, logprobs, candidates)
    likeliest, of_likeliest = candidates[:, 0].chunk(2)
    assert likeliest[:3].tolist() == [FIRST_TIME + 2, FIRST_TIME + 1, FIRST_TIME]
    assert of_likeliest.isfinite().tolist() == [True] * 3 + [False] * (COUNT - 3)


@in_both_forms
def test_rows_that_are_not_active_are_left_as_they_are(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbage(own: torch.Tensor, *shape: int, **kind: Any) -> torch.Tensor:
        made = own.new_zeros(shape, **kind)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", garbage)
    state, rules = SlotState.empty(2, 8, DEVICE), TokenRules(GenerationRules(), SPECIALS, VOCABULARY, DEVICE)
    state.active[1] = True
    tokens, logprobs = torch.tensor([7, 7], device=DEVICE), torch.tensor([0.5, 0.5], device=DEVICE)
    scores = torch.zeros(2, VOCABULARY, device=DEVICE)
    scores[:, FIRST_TIME + 9] = 1.0
    candidates = torch.full((2 * COUNT, 2), 3.0, device=DEVICE)
    choose_likeliest(kernels, rules, scores, state, tokens, logprobs, candidates)
    assert tokens.tolist() == [7, FIRST_TIME + 9]
    assert logprobs[0] == 0.5
    assert (candidates[:, 0] == 3).all()


def test_the_choice_tried_at_load_agrees_with_torch() -> None:
    rules = TokenRules(GenerationRules((1, 2), (END_OF_TEXT,), 50), SPECIALS, VOCABULARY, DEVICE)
    chosen = choose(TRITON, candidates(TRITON, rules, DEVICE), lambda compute: 0.0)
    assert chosen.report.count("triton 0.000 ms") == 3  # all were timed: their numbers were right


def test_a_choice_in_parts_that_is_right_for_times_alone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one row that is timed begins, and must be a time."""
    take_few_programs(monkeypatch)

    def wrong_for_text(*arguments: torch.Tensor) -> None:
        choose_token.choose_token_in_parts(*arguments)  # type: ignore[arg-type]
        num_generated, tokens = arguments[3], arguments[-3]
        tokens += num_generated > 0

    rules = TokenRules(GenerationRules((1, 2), (END_OF_TEXT,), 50), SPECIALS, VOCABULARY, DEVICE)
    kernels = replace(TRITON, choose_token_few=wrong_for_text)
    (tried,) = (each for each in candidates(kernels, rules, DEVICE) if each.name == "choose_token_few")
    assert judge(tried, lambda compute: 0.0).reason.startswith("whole: triton differs by 1")


def test_a_step_changes_the_slots_as_torch_does() -> None:
    """Rows that begin, that end, that stand at the last position, and one that is not active."""
    states = [SlotState.empty(100, 6, DEVICE) for _ in range(2)]  # rows of two programs
    for state in states:
        state.active[1:] = True
        for column in (state.token, state.previous, state.last_time, state.position, state.num_generated):
            column.copy_(torch.arange(100) % 7)
        state.position.clamp_(max=5)
        state.no_speech.copy_(torch.arange(100) / 100)
    tokens = torch.arange(100, device=DEVICE) + END_OF_TEXT - 2
    logprobs = -torch.arange(100.0, device=DEVICE)
    candidates = torch.randn(4, 128, device=DEVICE)[:, :100]
    found, expected = (
        state.end_step(tokens, logprobs, candidates, FIRST_TIME, END_OF_TEXT, kernels)
        for state, kernels in zip(states, (TRITON, TORCH), strict=True)
    )
    assert found.tolist() == expected.tolist()
    for field in fields(SlotState):
        assert torch.equal(*(getattr(state, field.name) for state in states)), field.name
    assert not states[0].active[2]
    assert (states[0].last_time >= FIRST_TIME).any()


@in_both_forms
@pytest.mark.parametrize("num_broken", [1, VOCABULARY])
def test_scores_that_are_no_numbers_show_in_the_log_probability(num_broken: int, kernels: Kernels) -> None:
    """By which the engine notices them: none is above 1 otherwise."""
    rules = TokenRules(GenerationRules(), SPECIALS, VOCABULARY, DEVICE)
    state = SlotState.empty(2, 8, DEVICE)
    state.active.fill_(True)
    tokens, logprobs = torch.zeros(2, dtype=torch.long, device=DEVICE), torch.zeros(2, device=DEVICE)
    scores = torch.zeros(2, VOCABULARY, device=DEVICE)
    scores[0, VOCABULARY - num_broken :] = float("nan")
    candidates = torch.zeros(2 * COUNT, 2, device=DEVICE)
    choose_likeliest(kernels, rules, scores, state, tokens, logprobs, candidates)
    assert not logprobs[0] <= 1
    assert logprobs[1] <= 0
    assert candidates[COUNT:, 0].isnan().all(), "a beam search goes on with none of them"
    assert candidates[COUNT:, 1].isfinite().all()
