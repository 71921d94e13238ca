"""The end of a step in torch: the choice, what keywords add, and what kernels are compared with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.engine.boost import Row
from asr_server.engine.slots import SlotState
from asr_server.engine.tokens import (
    ALWAYS,
    AT_BEGIN,
    GenerationRules,
    Named,
    TokenRules,
    candidates,
    choose_boosted,
    choose_likeliest,
    likeliest_named,
    log_probabilities,
    padded_rows,
    rows_at_once,
    top_scores,
)
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.kernels.table import FEW_ROWS, judge

CPU = torch.device("cpu")
VOCABULARY, END, FIRST_TIME = 60, 30, 36
SPECIALS: Any = SimpleNamespace(end_of_text=END, no_timestamps=35, timestamp_begin=FIRST_TIME)


def rules(max_initial: int | None = 5) -> TokenRules:
    given = GenerationRules((1, 33, VOCABULARY, -1), (2, END, 1), max_initial)
    return TokenRules(given, SPECIALS, VOCABULARY, CPU)


def test_the_rules_are_those_of_the_directorys_file(tmp_path: Path) -> None:
    config = {"suppress_tokens": [1, 2], "begin_suppress_tokens": [3], "max_initial_timestamp_index": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert GenerationRules.from_directory(tmp_path) == GenerationRules((1, 2), (3,), 50)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": null}')
    assert GenerationRules.from_directory(tmp_path) == GenerationRules()


def test_a_kernel_is_handed_the_same_rules() -> None:
    made = rules()
    cases = {token: case for token, case in enumerate(made.suppressed.tolist()) if case}
    assert cases == {1: ALWAYS | AT_BEGIN, 33: ALWAYS, 35: ALWAYS, 2: AT_BEGIN, END: AT_BEGIN}
    assert made.suppressed.dtype == torch.int8
    assert made.limits == (END, FIRST_TIME, FIRST_TIME + 5)
    assert rules(None).limits == (END, FIRST_TIME, VOCABULARY)


def test_blocks_of_rows_are_small_on_a_cpu_alone() -> None:
    assert list(rows_at_once(20, CPU)) == [slice(0, 8), slice(8, 16), slice(16, 20)]
    assert list(rows_at_once(8, CPU)) == [slice(0, 8)]
    assert list(rows_at_once(20, torch.device("cuda"))) == [slice(0, 20)]
    assert list(rows_at_once(0, CPU)) == list(rows_at_once(0, torch.device("cuda"))) == []


def test_log_probabilities_are_found_for_all_blocks() -> None:
    scores, tokens = torch.randn(20, 9, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 9
    expected = scores.log_softmax(-1)[torch.arange(20), tokens]
    torch.testing.assert_close(log_probabilities(scores, tokens), expected)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_step_chooses_the_likeliest_and_lists_the_next_ones(count: int) -> None:
    state = SlotState.empty(3, 8, CPU)
    state.num_generated.fill_(1)
    state.token.fill_(5)
    scores = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    scores[:, FIRST_TIME:] -= 20
    expected = scores.clone()
    rules().apply(expected, state)
    tokens, logprobs = torch.zeros(3, dtype=torch.long), torch.zeros(3)
    lines = torch.zeros(2 * count, 3)
    choose_likeliest(TORCH, rules(), scores, state, tokens, logprobs, lines)
    likely = expected.log_softmax(-1)
    assert tokens.tolist() == likely.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, likely.amax(-1))
    if count:
        largest = likely.topk(count)
        assert torch.equal(lines[:count].t().long(), largest.indices)
        torch.testing.assert_close(lines[count:].t(), largest.values)


@pytest.mark.parametrize("vocabulary", [100, 128, 500])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_largest_scores_are_found_and_of_equals_the_first(count: int, vocabulary: int) -> None:
    scores = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0))
    scores[0, [7, 70, 90]] = 9.0
    largest, tokens = top_scores(scores, count)
    expected = scores.topk(count)
    assert torch.equal(largest, expected.values)
    assert torch.equal(scores.gather(1, tokens), largest)
    if count == 1:
        assert int(tokens[0]) == 7


def allowed(text: tuple[int, ...], scores: Tensor | None = None) -> set[int]:
    """Return the tokens that may follow a text."""
    state = SlotState.empty(1, 8, CPU)
    state.num_generated.fill_(len(text))
    state.token.fill_(text[-1])
    state.previous.fill_(text[-2] if len(text) > 1 else 31)
    state.last_time.fill_(max((token for token in text if token >= FIRST_TIME), default=FIRST_TIME - 1))
    scores = torch.zeros(1, VOCABULARY) if scores is None else scores.clone()
    made = TokenRules(GenerationRules((0, 3), (), None), SPECIALS, VOCABULARY, CPU)
    made.apply(scores, state)
    return {token for token in range(VOCABULARY) if scores[0, token] > -math.inf}


def test_behind_the_second_token_a_time_may_be_followed_by_its_pair_or_the_end() -> None:
    scores = torch.zeros(1, VOCABULARY)
    scores[:, END] = 9.0  # likelier than all times together
    expected = {*range(END, FIRST_TIME - 1), *range(FIRST_TIME + 3, VOCABULARY)}
    assert allowed((5, FIRST_TIME + 3), scores) == expected
    assert allowed((6, 5, FIRST_TIME + 3), scores) == expected


def test_a_text_as_likely_as_all_times_together_may_follow_and_the_first_token_may_be_suppressed() -> None:
    scores = torch.full((1, VOCABULARY), -math.inf)
    scores[:, [0, 3, 4, FIRST_TIME + 5]] = torch.tensor([9.0, 9.0, 5.0, 5.0])
    assert allowed((7,), scores) == {4, FIRST_TIME + 5}


# -- Keywords -------------------------------------------------------------------------------------------


def test_rows_of_keywords_are_padded_with_what_is_impossible() -> None:
    rows = [Row((7,), (1.0,)), Row((), ()), Row((3, 4, 5), (1.0, 2.0, 3.0))]
    tokens, bonuses = padded_rows(rows)
    assert tokens.tolist() == [[7, 0, 0], [0, 0, 0], [3, 4, 5]]
    assert bonuses.tolist() == [[1.0, -math.inf, -math.inf], [-math.inf] * 3, [1.0, 2.0, 3.0]]
    tokens, bonuses = padded_rows(rows[:2], 3)
    assert tokens.tolist() == [[7, 0, 0], [0, 0, 0]]
    assert tokens.dtype == torch.long
    assert bonuses.tolist() == [[1.0, -math.inf, -math.inf], [-math.inf] * 3]
    assert padded_rows([Row((), ())])[0].shape == (1, 1)


def named(tokens: list[int], logprobs: list[float], bonuses: list[float]) -> Named:
    return Named(torch.tensor([tokens]), torch.tensor([logprobs]), torch.tensor([bonuses]))


@pytest.mark.parametrize(
    ("bonuses", "expected"),
    [
        ([1.0, 1.0], (9, -1.0)),  # -1.5 and -2.5
        ([2.5, 1.0], (4, -2.5)),  # 0 and -2.5
        ([1.0, 3.0], (5, -3.5)),
        ([1.5, 1.0], (9, -1.0)),  # as likely: without keywords it is the same
        ([-math.inf, -math.inf], (9, -1.0)),
    ],
)
def test_a_token_of_a_keyword_wins_by_its_bonus(bonuses: list[float], expected: tuple[int, float]) -> None:
    tokens, logprobs = choose_boosted(
        torch.tensor([9]), torch.tensor([-1.0]), named([4, 5], [-2.5, -3.5], bonuses)
    )
    assert (int(tokens), float(logprobs)) == expected


def test_of_a_keywords_tokens_the_likeliest_with_bonus_are_listed_beside_the_likeliest() -> None:
    given = named([4, 5, 6, 7], [-2.0, -3.0, -4.0, -5.0], [0.0, 3.0, 1.5, -math.inf])
    lines = likeliest_named(given, torch.tensor([[9, 5, 8]]), 3)
    assert lines.shape == (6, 1)
    tokens, logprobs = lines[:3, 0].tolist(), lines[3:, 0].tolist()
    assert tokens[:2] == [4, 6] or tokens[:2] == [6, 4]
    assert sorted(logprobs[:2]) == [-4.0, -2.0]
    assert logprobs[2] == -math.inf


# -- What kernels are compared with ---------------------------------------------------------------------


def by_torch(*arguments: Any) -> None:
    """Do a kernel's work in torch: choose by the rules of `arguments`, active rows alone."""
    scores, suppressed, _, num_generated, token, previous, last_time, *rest = arguments
    end, first_time, last_initial, tokens, logprobs, lines = rest
    state = SlotState.empty(len(scores), 8, CPU)
    for name, column in (
        *(("num_generated", num_generated), ("token", token)),
        *(("previous", previous), ("last_time", last_time)),
    ):
        getattr(state, name).copy_(column)
    vocabulary = scores.shape[1]
    always = tuple(n for n in range(vocabulary) if suppressed[n] & ALWAYS)
    begin = tuple(n for n in range(vocabulary) if suppressed[n] & AT_BEGIN)
    specials: Any = SimpleNamespace(end_of_text=end, no_timestamps=35, timestamp_begin=first_time)
    limit = None if last_initial == vocabulary else last_initial - first_time
    own = TokenRules(GenerationRules(always, begin, limit), specials, vocabulary, CPU)
    choose_likeliest(TORCH, own, scores.clone(), state, tokens, logprobs, lines)


def advance_by_torch(*arguments: Any) -> None:
    tokens, logprobs, no_speech, active, token, previous, position, num_generated, last_time, *rest = (
        arguments
    )
    generated, lines, first_time, end_of_text, report = rest
    state = SlotState.empty(len(tokens), generated.shape[1], CPU)
    columns = (active, token, previous, position, num_generated, last_time, generated)
    names = ("active", "token", "previous", "position", "num_generated", "last_time", "generated")
    for name, column in zip(names, columns, strict=True):
        setattr(state, name, column)
    state.advance(tokens, first_time, end_of_text)
    report.copy_(torch.cat([torch.stack([tokens, logprobs, no_speech]), lines]))


OURS = Kernels(choose_token=by_torch, choose_token_few=by_torch, advance=advance_by_torch)


def verdicts(kernels: Kernels) -> dict[str, str]:
    """Return what is said of each kernel, where it is the faster one."""
    reasons = {}
    for each in candidates(kernels, rules(), CPU):
        own = each.kernel
        reasons[each.name] = judge(each, lambda compute, own=own: float(compute is not own)).reason  # type: ignore[misc]
    return reasons


def test_kernels_that_are_right_are_taken() -> None:
    found = verdicts(OURS)
    assert list(found) == ["choose_token", "choose_token_few", "advance"]
    assert found["choose_token"].startswith("triton (triton 0.000 ms, torch 1000.000 ms)")
    assert found["choose_token_few"].startswith("triton (triton 0.000 ms, whole 1000.000 ms)")
    assert found["advance"].startswith("triton (triton 0.000 ms, torch")


def off_in(place: int, row: int) -> Any:
    """Return a kernel that is wrong in one row of an argument that it writes."""

    def wrong(*arguments: Any) -> None:
        by_torch(*arguments)
        written: Tensor = arguments[place]
        if row < written.shape[-1]:
            written[..., row] += 0.01 if written.is_floating_point() else 1

    return wrong


@pytest.mark.parametrize("place", [-3, -2, -1])
def test_a_kernel_that_is_wrong_in_any_row_is_not_taken(place: int) -> None:
    for row in (0, 31):
        wrong = replace(OURS, choose_token=off_in(place, row), choose_token_few=by_torch)
        assert "differs by" in verdicts(wrong)["choose_token"], row
    for row in (0, FEW_ROWS - 1):
        found = verdicts(replace(OURS, choose_token_few=off_in(place, row)))["choose_token_few"]
        assert found.startswith("whole: triton differs by"), row


@pytest.mark.parametrize("place", [3, 4, 5, 6, 7, 8, 9, -1])
def test_a_kernel_that_leaves_a_column_as_it_was_is_not_taken(place: int) -> None:
    def wrong(*arguments: Any) -> None:
        before = arguments[place].clone()
        advance_by_torch(*arguments)
        arguments[place].copy_(before if place > 0 else torch.zeros_like(before))

    assert "differs by" in verdicts(replace(OURS, advance=wrong))["advance"]


def test_the_rows_that_are_tried_are_of_every_kind() -> None:
    seen: list[tuple[int, bool, bool]] = []

    def noted(*arguments: Any) -> None:
        by_torch(*arguments)
        generated, token, previous = (arguments[place].tolist() for place in (3, 4, 5))
        for count, last, before in zip(generated, token, previous, strict=True):
            seen.append((min(count, 2), last >= FIRST_TIME, before >= FIRST_TIME))

    verdicts(replace(OURS, choose_token=noted))
    assert len(set(seen)) == 12
