"""Whisper's token rules for a batch, against openai-whisper's own filters one sequence at a time."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import DecodingOptions
from asr_server.engine.cuda import Transfers
from asr_server.engine.slots import SlotStart, SlotState
from asr_server.engine.tokens import GenerationRules, TokenRules, top_scores

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
