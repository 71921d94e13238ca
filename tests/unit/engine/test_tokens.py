"""Whisper's token rules for a batch, against openai-whisper's own filters one sequence at a time."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import ChunkId, DecodingOptions
from asr_server.engine.cuda import Transfers
from asr_server.engine.slots import SlotStart, SlotState
from asr_server.engine.tokens import (
    GenerationRules,
    TokenRules,
    draw,
    log_probabilities,
    noise_seed_of,
    penalise,
    top_scores,
)

END, NO_TIMESTAMPS, FIRST_TIME, VOCABULARY = 60, 69, 70, 110
SPECIALS = SpecialTokens(
    end_of_text=END,
    start_of_transcript=61,
    start_of_prev=62,
    no_speech=64,
    no_timestamps=NO_TIMESTAMPS,
    timestamp_begin=FIRST_TIME,
    transcribe=65,
    translate=66,
    languages={"en": 67},
    is_multilingual=True,
)
SUPPRESSED, AT_BEGIN = (3, 5, 61), (7, END)


def state_after(sequences: list[list[int]]) -> SlotState:
    """Slots in which these tokens were generated, all in one go or none."""
    state = SlotState.empty(len(sequences), 32, torch.device("cpu"))
    transfers = Transfers(torch.device("cpu"), overlap=False)
    for slot, tokens in enumerate(sequences):
        state.begin([SlotStart(slot, [61, 67, 65], DecodingOptions())], FIRST_TIME - 1, transfers)
        for token in tokens:
            state[slice(slot, slot + 1)].advance(torch.tensor([token]), FIRST_TIME, end_of_text=-1)
    return state


def openais(scores: Tensor, tokens: list[int], max_initial: int | None) -> Tensor:
    """One row of scores after openai-whisper's filters, in its order."""
    from whisper.decoding import ApplyTimestampRules

    row = scores.clone()[None]
    row[:, list(SUPPRESSED)] = float("-inf")
    if not tokens:
        row[:, list(AT_BEGIN)] = float("-inf")
    tokenizer = SimpleNamespace(eot=END, no_timestamps=NO_TIMESTAMPS, timestamp_begin=FIRST_TIME)
    rules = ApplyTimestampRules(cast(Any, tokenizer), 0, max_initial)
    rules.apply(row, torch.tensor([tokens], dtype=torch.long))
    return row[0]


def plausible_tokens(choose: random.Random) -> list[int]:
    """Text and closed or open pairs of times that never go back."""
    tokens: list[int] = []
    time = FIRST_TIME
    for _ in range(choose.randrange(4)):
        time = min(VOCABULARY - 1, time + choose.randrange(6))
        tokens += [time] + [choose.randrange(50) for _ in range(choose.randrange(3))]
        if choose.random() < 0.6:
            time = min(VOCABULARY - 1, time + choose.randrange(1, 6))
            tokens += [time]
    return tokens[: choose.randrange(len(tokens) + 1)]


@pytest.mark.parametrize("max_initial", [None, 0, 10])
@pytest.mark.parametrize("seed", range(20))
def test_the_batch_obeys_openai_whispers_rules(seed: int, max_initial: int | None) -> None:
    choose = random.Random(seed)
    sequences = [[], *(plausible_tokens(choose) for _ in range(15))]
    torch.manual_seed(seed)
    scores = 3 * torch.randn(len(sequences), VOCABULARY)
    scores[:, FIRST_TIME:] += torch.randn(len(sequences), 1) * 2 - 1  # in some rows, all times together win
    expected = [openais(row, tokens, max_initial) for row, tokens in zip(scores, sequences, strict=True)]
    rules = TokenRules(
        GenerationRules(SUPPRESSED, AT_BEGIN, max_initial), SPECIALS, VOCABULARY, torch.device("cpu")
    )
    rules.apply(scores, state_after(sequences))
    assert torch.equal(scores, torch.stack(expected))


def test_suppressed_ids_outside_the_vocabulary_are_ignored() -> None:
    rules = TokenRules(GenerationRules((-1, VOCABULARY + 5, 4)), SPECIALS, VOCABULARY, torch.device("cpu"))
    scores = torch.zeros(1, VOCABULARY)
    scores[:, 0] = 9.0  # likelier than all times together, so that text is not forbidden
    rules.apply(scores, state_after([[1, 2]]))
    assert scores.isinf().nonzero().tolist() == [[0, 4], [0, NO_TIMESTAMPS]]


@pytest.mark.parametrize(("vocabulary", "count"), [(51865, 6), (51865, 1), (1280, 10), (1280, 11), (90, 6)])
def test_the_top_scores_are_those_of_a_whole_sort(vocabulary: int, count: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(7, vocabulary)
    scores[1, : vocabulary - 20] = float("-inf")  # the last ones are no whole block
    scores[2, 70:80] = 9.0 + torch.arange(10)  # all in one block
    values, tokens = top_scores(scores, count)
    expected = scores.sort(descending=True)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(tokens, expected.indices[:, :count])


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
