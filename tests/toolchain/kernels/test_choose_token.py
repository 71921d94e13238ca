"""The kernels at the end of a step on a small vocabulary: the tokens, log-probabilities and slots of torch.

Under Triton's interpreter; on a GPU compiled.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asr_server.engine.slots import Choice, SlotState
from asr_server.engine.tokens import GenerationRules, TokenRules, choose_likeliest
from asr_server.model.kernels import TORCH, Kernels, choose_token, triton_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, END_OF_TEXT, FIRST_TIME = 60, 30, 36
BLOCK = 16
SPECIALS: Any = SimpleNamespace(end_of_text=END_OF_TEXT, no_timestamps=35, timestamp_begin=FIRST_TIME)
TRITON = triton_kernels()
COUNT = 2  # candidates


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the last one is not full. Few parts: the interpreter takes its time for each."""
    monkeypatch.setattr(choose_token, "_BLOCK", BLOCK)


class Row(NamedTuple):
    """What a slot has written, and the scores that matter: all others are below -3."""

    scores: dict[int, float]
    text: tuple[int, ...] = (5,)
    last_time: int = FIRST_TIME - 1


T = FIRST_TIME
NO_TIMES = dict.fromkeys(range(T, VOCABULARY), float("-inf"))
NEARLY_ALL_TIMES = dict.fromkeys(range(T, T + 8), 2.0)
ROWS = {
    "a text begins with a time": Row({3: 9.0, T + 2: 1.0, END_OF_TEXT: 8.0}, ()),
    "a first time has a limit": Row({T + 9: 9.0, T + 4: 1.0, T + 5: 0.5}, ()),
    "what is suppressed at the beginning may follow": Row({2: 9.0, 7: 8.0}),
    "what is suppressed always may not": Row({1: 9.0, 20: 8.0, 35: 9.5, 33: 8.5}),
    "the last text and the end": Row({END_OF_TEXT: 9.0, END_OF_TEXT - 1: 8.9, END_OF_TEXT + 1: 8.8}),
    "times that are likelier together": Row({9: 4.0, 12: 3.0} | NEARLY_ALL_TIMES),
    "times that are not": Row({9: 4.2, 12: 3.0} | NEARLY_ALL_TIMES),
    "behind one time no text follows": Row({8: 9.0, END_OF_TEXT: 1.0, T + 3: 0.9}, (5, T + 3), T + 3),
    "but the same time": Row({T + 3: 9.0, T + 4: 8.0, T + 2: 8.5, 29: 9.9}, (5, T + 3), T + 3),
    "behind two times no third": Row({T + 5: 9.0, 6: 1.0, 7: 0.5}, (T + 3, T + 3), T + 3),
    "a time alone begins a segment": Row({T + 5: 9.0, 6: 1.0}, (T + 3,), T + 3),
    "times go on": Row({T + 3: 9.0, T + 2: 8.5, T + 4: 8.0, 7: -1.0}, (T + 3, 6), T + 3),
    "behind the very first time": Row({8: 9.0, T: 0.5, T + 1: 1.0}, (5, T), T),
    "behind the very first time twice": Row({T + 5: 9.0, 6: 1.0, 7: 0.5}, (T, T), T),
    "behind the very first time and another": Row({T + 5: 9.0, 6: 1.0, 7: 0.5}, (T, T + 1), T + 1),
    "equal ones": Row({17: 5.0, 4: 5.0, 16: 5.0}),
    "equal ones of one lane": Row({20: 5.0, 4: 5.0}),
    "a text and the only time, equal and of one lane": Row(NO_TIMES | {4: 5.0, T: 5.0}),
    "the only time and a text that is less likely": Row(NO_TIMES | {4: 4.0, 5: 3.5, T + 2: 5.0}),
    "the very first token behind another of its lane": Row({16: 9.0, 0: 8.0}),
    "the end behind a time of its lane": Row({T + 10: 9.0, END_OF_TEXT: 8.9}, (5, T + 3), T + 3),
    "a time of its lane that has passed": Row({4: 9.0, T: 8.5, 20: 8.0}, (T + 3, 6), T + 3),
    "the next time behind a text of its lane": Row({8: 9.0, T + 4: 8.5}, (T + 3, 6), T + 3),
    "what lies behind the vocabulary in a lane": Row({VOCABULARY - 3 * BLOCK: 9.0, 28: 8.0}),
    "unlikely ones": Row(NO_TIMES | {7: -1.0, 8: -2.0}),
    "two of one lane, blocks apart": Row({2: 9.0, 2 + 2 * BLOCK: 8.0}),
    "two times of one lane": Row({T + 3: 9.0, T + 3 + BLOCK: 8.5}),
    "the second of a lane before the first": Row({14 + BLOCK: 9.0, 14: 8.0}),
}


def state_of(rows: list[Row]) -> SlotState:
    state = SlotState.empty(len(rows), 8, DEVICE)
    state.active.fill_(1)
    for number, row in enumerate(rows):
        state.num_generated[number] = len(row.text)
        state.token[number] = row.text[-1] if row.text else T + 1  # of a prompt: it is no time of this text
        state.previous[number] = row.text[-2] if len(row.text) > 1 else T + 1
        state.last_time[number] = row.last_time
    return state


def scores_of(rows: list[Row]) -> Tensor:
    """Return [B, vocabulary], rows further apart than the vocabulary is long."""
    torch.manual_seed(1)
    stored = torch.full((len(rows), 64), 99.0, device=DEVICE)
    scores = stored[:, :VOCABULARY]
    scores.copy_(-3 - torch.rand(len(rows), VOCABULARY))
    for number, row in enumerate(rows):
        scores[number, list(row.scores)] = torch.tensor(list(row.scores.values()), device=DEVICE)
    return scores


def choose(kernels: Kernels, rows: list[Row], max_initial: int | None, count: int) -> list[Tensor]:
    """Return tokens, log-probabilities and candidates."""
    given = GenerationRules((1, 33, T + 7), (2, END_OF_TEXT, T + 10), max_initial)
    rules = TokenRules(given, SPECIALS, VOCABULARY, DEVICE)
    tokens = torch.zeros(len(rows), dtype=torch.long, device=DEVICE)
    logprobs = torch.zeros(len(rows), device=DEVICE)
    candidates = torch.zeros(2 * count, len(rows), device=DEVICE)
    choose_likeliest(kernels, rules, scores_of(rows), state_of(rows), Choice(tokens, logprobs, candidates))
    return [tokens, logprobs, candidates]


def test_each_row_gets_torchs_token_and_candidates() -> None:
    rows = list(ROWS.values())
    found, logprobs, candidates = choose(TRITON, rows, 5, COUNT)
    expected, expected_logprobs, of_torch = choose(TORCH, rows, 5, COUNT + 1)
    assert dict(zip(ROWS, found.tolist(), strict=True)) == dict(zip(ROWS, expected.tolist(), strict=True))
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    likeliest, of_likeliest = candidates.chunk(2)
    torch.testing.assert_close(of_likeliest, of_torch[COUNT + 1 : -1], atol=1e-5, rtol=0)
    assert likeliest[0].tolist() == expected.tolist()
    assert (likeliest[0] != likeliest[1]).all()
    is_tied = of_likeliest[0] == of_likeliest[1]
    assert is_tied.any()
    assert (likeliest[1] > likeliest[0])[is_tied].all(), "the first of equal ones comes first"
    apart = of_torch[COUNT + 1 :].diff(dim=0).abs().min(0).values > 1e-4
    assert torch.equal(likeliest[:, apart], of_torch[:COUNT, apart])


def test_without_a_beam_and_a_limit_the_token_alone_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "a first time has a limit",
        "what is suppressed at the beginning may follow",
        "times that are not",
    ]
    rows = [ROWS[name] for name in names]
    found, expected = (choose(each, rows, None, 0) for each in (TRITON, TORCH))
    assert found[0].tolist() == expected[0].tolist() == [FIRST_TIME + 9, 2, 9]
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_text_begins_with_unsuppressed_times(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are asked for, the first token of the lane of one of them not among them."""
    rows = [Row({T + 7: 9.5, T + 10: 9.0, T + 12: 8.0, 0: 7.5, T + 1: 1.0, T + 2: 0.5}, ())]
    found, expected = (choose(each, rows, None, count) for each in (TRITON, TORCH))
    for own, of_torch in zip(found, expected, strict=True):
        torch.testing.assert_close(own, of_torch, atol=1e-5, rtol=0)
    assert found[2][:count, 0].tolist() == [T + 12, T + 1, T + 2][:count]


def test_tokens_of_which_few_are_possible_are_followed_by_impossible_ones() -> None:
    state = SlotState.empty(1, 8, DEVICE)
    state.active.fill_(1)
    state.last_time.fill_(FIRST_TIME - 1)
    rules = TokenRules(GenerationRules((), (), 0), SPECIALS, VOCABULARY, DEVICE)
    candidates = torch.zeros(2 * COUNT, 1, device=DEVICE)
    scores = torch.arange(float(VOCABULARY), device=DEVICE)[None]
    tokens, logprobs = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.zeros(1, device=DEVICE)
    choose_likeliest(TRITON, rules, scores, state, Choice(tokens, logprobs, candidates))
    likeliest, of_likeliest = candidates[:, 0].chunk(2)
    assert likeliest[:1].tolist() == [FIRST_TIME]
    assert of_likeliest.isfinite().tolist() == [True, False]


def test_rows_that_are_not_active_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
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
    choose_likeliest(TRITON, rules, scores, state, Choice(tokens, logprobs, candidates))
    assert tokens.tolist() == [7, FIRST_TIME + 9]
    assert logprobs[0] == 0.5
    assert (candidates[:, 0] == 3).all()


def test_a_step_changes_the_slots_as_torch_does() -> None:
    """Rows that begin, that end, that stand at the last position, and one that is not active."""
    states = [SlotState.empty(100, 6, DEVICE) for _ in range(2)]  # rows of two programs
    for state in states:
        state.active[1:] = 1
        for column in (state.token, state.previous, state.last_time, state.position, state.num_generated):
            column.copy_(torch.arange(100) % 7)
        state.position.clamp_(max=5)
        state.previous.add_(1)
        state.no_speech.copy_(torch.arange(100) / 100)
    tokens = torch.arange(100, device=DEVICE) + END_OF_TEXT - 2
    logprobs = -torch.arange(100.0, device=DEVICE)
    candidates = torch.randn(4, 128, device=DEVICE)[:, :100]
    found, expected = (
        state.end_step(Choice(tokens, logprobs, candidates), FIRST_TIME, END_OF_TEXT, kernels)
        for state, kernels in zip(states, (TRITON, TORCH), strict=True)
    )
    assert found.tolist() == expected.tolist()
    assert torch.equal(states[0].integers, states[1].integers)
    assert not states[0].active[2]
    assert (states[0].last_time >= FIRST_TIME).any()


@pytest.mark.filterwarnings("ignore:(All-NaN slice|invalid value encountered in cast):RuntimeWarning")
@pytest.mark.parametrize("num_broken", [1, VOCABULARY])
def test_scores_that_are_no_numbers_show_in_the_log_probability(num_broken: int) -> None:
    """By which the engine notices them: none is above 1 otherwise."""
    rules = TokenRules(GenerationRules(), SPECIALS, VOCABULARY, DEVICE)
    state = SlotState.empty(2, 8, DEVICE)
    state.active.fill_(1)
    tokens, logprobs = torch.zeros(2, dtype=torch.long, device=DEVICE), torch.zeros(2, device=DEVICE)
    scores = torch.zeros(2, VOCABULARY, device=DEVICE)
    scores[0, VOCABULARY - num_broken :] = float("nan")
    candidates = torch.zeros(2 * COUNT, 2, device=DEVICE)
    choose_likeliest(TRITON, rules, scores, state, Choice(tokens, logprobs, candidates))
    assert not logprobs[0] <= 1
    assert logprobs[1] <= 0
    assert candidates[COUNT:, 0].isnan().all(), "a beam search goes on with none of them"
    assert candidates[COUNT:, 1].isfinite().all()
