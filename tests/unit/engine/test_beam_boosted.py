"""Keywords in a search: a complete one wins, an unfinished one costs no other text its place."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from asr_server.engine.beam import NUM_NAMED, NUM_RESERVED, BeamSearch, Hypothesis, leads, num_candidates
from asr_server.engine.boost import KeywordBoost, Row
from tests.unit.engine.test_beam import END, WIDTH, found, next_candidates, next_logprobs, read_on

Lists = list[list[tuple[int, float]]]


def machine(*keywords: tuple[int, ...]) -> KeywordBoost:
    return KeywordBoost(keywords, (), lambda token: False)


def test_a_keyword_that_is_complete_wins_over_a_likelier_text() -> None:
    beam = BeamSearch(WIDTH, 30, END, boost=machine((2, 3)))
    assert read_on(beam, {1: 0.9, 2: 0.1}) == [(1,), (2,)]
    read_on(beam, {4: 0.9}, {3: 0.9})
    assert read_on(beam, {5: 0.9}, {6: 0.9}) == [(1, 4, 5), (2, 3, 6)]
    read_on(beam, {END: 0.9}, {END: 0.9})
    best = beam.best()
    assert best.tokens == (2, 3, 6)
    assert best.sum_logprob - best.match.earned == pytest.approx(math.log(0.1 * 0.9**3))
    assert best.logprobs == pytest.approx([math.log(p) for p in (0.1, 0.9, 0.9)])


def test_a_keyword_that_breaks_off_ends_the_text_that_was_kept_for_it() -> None:
    beam = BeamSearch(WIDTH, 30, END, boost=machine((2, 3, 4, 7)))
    assert read_on(beam, {1: 0.9, 2: 0.1}) == [(1,), (2,)]
    assert read_on(beam, {5: 0.9}, {3: 0.9}) == [(1, 5), (2, 3)]
    assert read_on(beam, {6: 0.9}, {4: 0.9}) == [(1, 5, 6), (2, 3, 4)]
    assert read_on(beam, {1: 0.9}, {8: 0.9, END: 0.1}) == [(1, 5, 6, 1)]
    assert beam.ended == []


def test_a_keyword_that_is_not_complete_prunes_no_other_text() -> None:
    beam = BeamSearch(WIDTH, 30, END, boost=machine((2, 3, 4, 7)))
    assert read_on(beam, {1: 0.4, 5: 0.3, 2: 0.3}) == [(1,), (5,), (2,)]
    assert read_on(beam, {6: 0.9}, {8: 0.9}, {3: 0.9}) == [(1, 6), (5, 8), (2, 3)]


# -- A search of a model made of chance -------------------------------------------------------------------


def chance_keywords(seed: int) -> KeywordBoost:
    chance = random.Random(seed)
    return machine(*(tuple(chance.choices(range(1, END), k=chance.randint(3, 5))) for _ in range(4)))


def next_tokens(beam: BeamSearch, own: KeywordBoost | None, seed: int) -> tuple[Lists, Lists]:
    """Return the likeliest tokens of each hypothesis, and the others that keywords name."""
    likeliest: Lists = []
    named: Lists = []
    for each in beam.running:
        logprobs = next_logprobs(each.tokens, seed).double()
        top = logprobs.topk(num_candidates(WIDTH))
        likeliest.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        row = own.row(each.match.state) if own else Row((), ())
        others = [
            (bonus + float(logprobs[token]), token)
            for token, bonus in zip(row.tokens, row.bonuses, strict=True)
            if token not in top.indices
        ]
        best = sorted(others, reverse=True)[:NUM_NAMED]
        named.append([(token, float(logprobs[token])) for _, token in best])
    return likeliest, named


def search(own: KeywordBoost | None, seed: int) -> tuple[Hypothesis, set[str]]:
    """Return the best text, and what happened on the way."""
    beam = BeamSearch(WIDTH, 12, END, boost=own)
    seen: set[str] = set()
    while not beam.is_over:
        beam.advance(*next_tokens(beam, own, seed))
        texts = [*beam.running, *beam.ended]
        seen |= {"tentative"} if any(each.is_tentative for each in texts) else set()
        seen |= {"complete"} if any(each.match.earned for each in texts) else set()
        seen |= {"wide"} if len(beam.running) > WIDTH - NUM_RESERVED else set()
        assert len(beam.running) <= WIDTH
    return beam.best(), seen


@pytest.mark.slow
def test_until_a_keyword_is_complete_a_narrow_search_is_the_one_without_keywords() -> None:
    num_unfinished = num_complete = 0
    for seed in range(100):
        (plain, seen_without), (found, seen) = search(None, seed), search(chance_keywords(seed), seed)
        if "complete" in seen:
            num_complete += bool(found.match.earned)
            continue
        if "wide" in seen_without:
            continue
        assert found[:3] == plain[:3]
        num_unfinished += "tentative" in seen
    assert num_unfinished > 3
    assert num_complete > 6


@pytest.mark.parametrize("seed", range(20))
def test_the_model_s_own_log_probabilities_are_reported(seed: int) -> None:
    best, _ = search(chance_keywords(seed), seed)
    expected = [float(next_logprobs(best.tokens[:at], seed)[token]) for at, token in enumerate(best.tokens)]
    assert best.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_sure_search_with_keywords_appends_what_comparing_all_tokens_would_keep() -> None:
    num_sure = 0
    for seed in range(60):
        chance, own = random.Random(seed), chance_keywords(seed)
        fast, plain = (BeamSearch(WIDTH, 12, END, boost=own) for _ in range(2))
        while not plain.is_over:
            rows = [next_candidates(chance) for _ in plain.running]
            lists = [list(zip(map(int, row[0]), row[1], strict=True)) for row in rows]
            named = [
                [(token, chance.uniform(-12, -6)) for token in own.row(each.match.state).tokens[:NUM_NAMED]]
                for each in plain.running
            ]
            tokens, logprobs = np.array(rows).transpose(1, 0, 2)
            (logprob, *_), (lead, *_) = leads(tokens, logprobs, END)
            is_sure = fast.append_if_sure(lists[0][0][0], logprob, lead, [*lists[0][1:], *named[0]])
            parents = [0] if is_sure else fast.advance(lists, named)
            assert parents == plain.advance(lists, named)
            assert found(fast) == found(plain)
            num_sure += is_sure
    assert num_sure > 60
