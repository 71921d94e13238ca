"""Drawing tokens: what may be drawn, how often, and the same again for the same seed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.core import ChunkId
from asr_server.engine.slots import SlotState
from asr_server.engine.tokens import draw, log_probabilities, noise_seed_of, penalise

SCORES = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, float("-inf")])
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def state(rows: int, **settings: Any) -> SlotState:
    made = SlotState.empty(rows, 64, torch.device("cpu"))
    for name, value in (NEUTRAL | settings).items():
        getattr(made, name)[:] = value
    return made


def draws(count: int, **settings: Any) -> Tensor:
    """Many draws from SCORES, each with another seed."""
    return draw(SCORES.expand(count, -1), state(count, noise_seed=torch.arange(count), **settings))


def shares(drawn: Tensor) -> Tensor:
    return torch.bincount(drawn, minlength=len(SCORES)) / len(drawn)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.5])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    found = shares(draws(20_000, temperature=temperature))
    torch.testing.assert_close(found, (SCORES / temperature).softmax(-1), atol=1.2e-2, rtol=0)
    assert found[5] == 0, "a forbidden token"


def test_the_steps_of_one_try_are_drawn_as_freely_as_different_tries() -> None:
    made = state(20_000, noise_seed=7, num_generated=torch.arange(20_000))
    drawn = draw(SCORES.expand(20_000, -1), made)
    torch.testing.assert_close(shares(drawn), SCORES.softmax(-1), atol=1.2e-2, rtol=0)
    likely = (drawn[1:] == 0) & (drawn[:-1] == 0)
    assert likely.float().mean().item() == pytest.approx(SCORES.softmax(-1)[0].item() ** 2, abs=1.2e-2)


def test_the_last_digits_of_scores_decide_no_draw() -> None:
    """Among thousands of about equally likely tokens, as another batch or several ranks find them."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(24, 51866, generator=generator)
    rounded = scores + 1e-5 * torch.randn(scores.shape, generator=generator)
    made = state(24, temperature=0.4, top_p=0.999, noise_seed=torch.arange(24))
    assert torch.equal(draw(scores, made), draw(rounded, made))
    assert len(set(draw(scores, made).tolist())) > 20


def test_the_rows_of_a_batch_draw_as_alone() -> None:
    made = state(4, noise_seed=torch.arange(4), num_generated=torch.arange(4) * 3)
    scores = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    alone = [draw(scores[row : row + 1], made[slice(row, row + 1)]).item() for row in range(4)]
    assert draw(scores, made).tolist() == alone


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),  # the first alone has 0.55
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.3}, {0, 1}),  # e^-1 of the first, e^-1.5 is less
        ({"top_k": 3, "min_p": 0.3}, {0, 1}),
    ],
)
def test_the_choice_is_restricted_as_asked(settings: dict[str, float], allowed: set[int]) -> None:
    assert set(draws(2_000, **settings).tolist()) == allowed


def test_each_row_draws_by_its_own_settings() -> None:
    made = state(3000, top_k=torch.tensor([1, 0, 2] * 1000), noise_seed=torch.arange(3000))
    by_setting = draw(SCORES.expand(3000, -1), made).reshape(1000, 3)
    assert [set(column.tolist()) for column in by_setting.T] == [{0}, {0, 1, 2, 3, 4}, {0, 1}]


def test_penalties_lower_what_was_generated_and_nothing_else() -> None:
    made = state(1, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    for token in (0, 0, 4, 5):  # 5 stands for end-of-text here
        made.advance(torch.tensor([token]), first_time=99, end_of_text=5)
    scores = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 3.0]])
    found = penalise(scores, made, end_of_text=5)
    expected = torch.tensor([[2.0 / 2 - 0.5 - 0.5, 1.0, 0.5, 0.0, -1.0 * 2 - 0.25 - 0.5, 3.0]])
    torch.testing.assert_close(found, expected)


def test_log_probabilities_are_those_of_the_softmax() -> None:
    tokens = torch.arange(20) % len(SCORES)  # more rows than are computed at once
    found = log_probabilities(SCORES.expand(20, -1), tokens)
    torch.testing.assert_close(found, SCORES.log_softmax(-1)[tokens])


def test_random_numbers_are_the_same_in_every_process() -> None:
    seed = noise_seed_of(7, ChunkId("any request", 3, part=1), 0.4)
    assert seed == KNOWN_SEED
    made = state(5, noise_seed=seed, num_generated=torch.arange(5))
    assert draw(torch.zeros(5, 51866), made).tolist() == KNOWN_DRAWS


KNOWN_SEED = 3054469152052268
KNOWN_DRAWS = [20964, 16800, 51852, 26998, 45850]
