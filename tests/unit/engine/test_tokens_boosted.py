"""The choice among tokens that keywords name, next to adding every bonus to all scores."""

from __future__ import annotations

import math

import torch

from asr_server.engine.beam import NUM_NAMED
from asr_server.engine.boost import Row
from asr_server.engine.tokens import Named, choose_boosted, likeliest_named, padded_rows, top_scores


def made_up() -> tuple[torch.Tensor, list[Row]]:
    """Log-probabilities [B, vocabulary], some of them impossible, and what keywords name in each row."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 60, generator=generator) * 3
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -math.inf
    rows = [
        Row(tuple(torch.randperm(60, generator=generator)[: number % 9].tolist()), (2.5,) * (number % 9))
        for number in range(len(scores))
    ]
    return scores.log_softmax(-1), rows


def named_in(plain: torch.Tensor, rows: list[Row], width: int = 1) -> Named:
    tokens, bonuses = padded_rows(rows, width)
    return Named(tokens, plain.gather(1, tokens), bonuses)


def test_the_choice_is_that_of_adding_every_bonus_to_all_scores() -> None:
    plain, rows = made_up()
    dense = plain.clone()
    for number, row in enumerate(rows):
        dense[number, list(row.tokens)] += torch.tensor(row.bonuses)
    logprobs, tokens = (each[:, 0] for each in top_scores(plain, 1))
    chosen, own = choose_boosted(tokens, logprobs, named_in(plain, rows))
    assert torch.equal(chosen, dense.argmax(-1))
    assert not torch.equal(chosen, tokens)
    torch.testing.assert_close(own, plain.gather(1, chosen[:, None])[:, 0])


def test_a_search_is_given_the_likeliest_named_tokens_that_it_does_not_have() -> None:
    plain, rows = made_up()
    likeliest = plain.topk(4).indices
    lines = likeliest_named(named_in(plain, rows, NUM_NAMED), likeliest, NUM_NAMED)
    tokens, logprobs = lines.reshape(2, NUM_NAMED, len(rows))
    for number, row in enumerate(rows):
        others = {token: float(plain[number, token]) for token in row.tokens}
        others = {token: own for token, own in others.items() if token not in likeliest[number]}
        expected = sorted(others.items(), key=lambda each: -each[1])[:NUM_NAMED]
        found = zip(tokens[:, number].long().tolist(), logprobs[:, number].tolist(), strict=True)
        possible = [(token, own) for token, own in expected if own > -math.inf]
        assert [each for each in found if each[1] > -math.inf] == possible


def test_a_token_that_the_rules_forbid_is_not_chosen_for_its_bonus() -> None:
    plain = torch.tensor([[0.0, -math.inf, 1.0]]).log_softmax(-1)
    named = named_in(plain, [Row((1,), (99.0,))], NUM_NAMED)
    assert choose_boosted(torch.tensor([2]), plain[:, 2], named)[0].tolist() == [2]
    assert likeliest_named(named, torch.tensor([[2]]), 1)[1].tolist() == [-math.inf]
