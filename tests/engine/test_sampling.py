"""Drawing tokens: what may be drawn, how often, and the same again for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.core import ChunkId
from asr_server.engine.sampling import draw, log_probabilities, penalise, uniforms_of
from asr_server.engine.slots import SlotState

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
    """Many draws from SCORES, with evenly spread random numbers."""
    made = state(count, **settings)
    made.uniforms[:, 0] = (torch.arange(count) + 0.5) / count
    return draw(SCORES.expand(count, -1), made)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.5])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    shares = torch.bincount(draws(10_000, temperature=temperature), minlength=6) / 10_000
    torch.testing.assert_close(shares, (SCORES / temperature).softmax(-1), atol=2e-4, rtol=0)


def test_a_forbidden_token_is_never_drawn_even_by_the_last_random_number() -> None:
    made = state(1)
    made.uniforms[:, 0] = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert draw(SCORES[None], made).item() == 4


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
    made = state(3, top_k=torch.tensor([1, 0, 2]))
    made.uniforms[:, 0] = 0.999
    assert draw(SCORES.expand(3, -1), made).tolist() == [0, 4, 1]


def test_penalties_lower_what_was_generated_and_nothing_else() -> None:
    made = state(1, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    for token in (0, 0, 4, 5):  # 5 stands for end-of-text here
        made.advance(torch.tensor([token]), first_time=99)
    scores = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 3.0]])
    found = penalise(scores, made, end_of_text=5)
    expected = torch.tensor([[2.0 / 2 - 0.5 - 0.5, 1.0, 0.5, 0.0, -1.0 * 2 - 0.25 - 0.5, 3.0]])
    torch.testing.assert_close(found, expected)


def test_log_probabilities_are_those_of_the_softmax() -> None:
    found = log_probabilities(SCORES.expand(2, -1), torch.tensor([1, 4]))
    torch.testing.assert_close(found, SCORES.log_softmax(-1)[[1, 4]])


def test_random_numbers_are_the_same_in_every_process() -> None:
    found = uniforms_of(7, ChunkId("any request", 3, part=1), 0.4, 3)
    torch.testing.assert_close(found, torch.tensor(KNOWN), atol=0, rtol=0)


def test_random_numbers_hang_on_seed_chunk_part_and_temperature_alone() -> None:
    base = uniforms_of(7, ChunkId("a", 3, 1), 0.4, 8)
    assert torch.equal(base, uniforms_of(7, ChunkId("b", 3, 1, attempt=2), 0.4, 8))
    others = [(8, 3, 1, 0.4), (7, 2, 1, 0.4), (7, 3, 0, 0.4), (7, 3, 1, 0.6)]
    for seed, chunk, part, temperature in others:
        assert not torch.equal(base, uniforms_of(seed, ChunkId("a", chunk, part), temperature, 8))
    assert ((base >= 0) & (base < 1)).all()


KNOWN = [0.2466111183166504, 0.6899994611740112, 0.3356826901435852]
