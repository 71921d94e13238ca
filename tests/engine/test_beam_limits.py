"""A search's limits: how unlikely a hypothesis may be, how long a text, and when two are the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asr_server.engine.beam import BeamSearch, Hypothesis, leads, num_candidates, num_named
from asr_server.engine.boost import Match
from tests.engine.test_beam import END, WIDTH, read_on


def test_a_search_compares_one_candidate_more_than_it_is_wide_and_a_greedy_one_none() -> None:
    assert [num_candidates(width) for width in (1, 2, 5)] == [0, 3, 6]
    assert [num_named(width) for width in (1, 2, 5)] == [0, 3, 3]


@pytest.mark.parametrize(("ratio", "is_kept"), [(4.4, True), (4.6, False)])
def test_a_hypothesis_may_be_four_and_a_half_times_less_likely(ratio: float, is_kept: bool) -> None:
    """By e^1.5."""
    beam = BeamSearch(WIDTH, 30, END)
    assert read_on(beam, {1: 0.8, 2: 0.8 / ratio}) == [(1,), *[(2,)] * is_kept]
    sure = BeamSearch(WIDTH, 30, END)
    assert sure.append_if_sure(1, math.log(0.8), math.log(ratio)) is not is_kept


def test_a_text_that_is_as_long_as_it_may_be_ends_the_search() -> None:
    beam = BeamSearch(WIDTH, 2, END)
    assert not beam.is_over
    read_on(beam, {1: 0.9})
    assert not beam.is_over
    read_on(beam, {2: 0.9})
    assert beam.is_over
    assert beam.best().tokens == (1, 2)


def test_a_search_ends_with_as_many_texts_as_it_is_wide() -> None:
    beam = BeamSearch(2, 30, END)
    read_on(beam, {1: 0.6, 2: 0.4})
    assert read_on(beam, {3: 0.6, END: 0.4}, {4: 0.5, END: 0.4}) == [(1, 3), (2, 4)]
    assert not beam.is_over
    assert [each.tokens for each in beam.ended] == [(1,)], "two are kept before the other end is looked at"
    read_on(beam, {5: 0.3, END: 0.6}, {6: 0.9})
    assert beam.is_over
    assert len(beam.ended) == 2


def test_one_hypothesis_agrees_and_two_do_not() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert beam.agrees
    read_on(beam, {1: 0.5, 2: 0.4})
    assert not beam.agrees
    assert not beam.append_if_sure(3, -0.01, 9.0)
    beam.running = [Hypothesis(is_tentative=True)]
    assert not beam.agrees, "it is there for its match alone"


def test_a_sure_token_adds_to_the_text_and_its_probability() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert beam.append_if_sure(1, -0.25, 9.0)
    assert beam.append_if_sure(2, -0.5, 9.0)
    assert beam.running == [Hypothesis((1, 2), (-0.25, -0.5), -0.75)]
    assert not beam.append_if_sure(END, -0.1, 9.0), "an end is compared"
    assert not beam.append_if_sure(END + 1, -0.1, 9.0), "and so is a time"
    assert read_on(beam, {END + 1: 0.9}) == [(1, 2, END + 1)]
    assert not beam.append_if_sure(3, -0.1, 9.0), "what follows a time may lie behind the audio"
    beam = BeamSearch(WIDTH, 30, END)
    read_on(beam, {1: 0.5, END: 0.5})
    assert not beam.append_if_sure(2, -0.1, 9.0), "another text has ended"


def test_a_sure_token_of_a_text_that_is_not_the_greedy_one_leaves_it_so() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    beam.running = [Hypothesis((1,), (-1.0,), -1.0, is_greedy=False)]
    assert beam.append_if_sure(2, -0.5, 9.0)
    assert beam.running == [Hypothesis((1, 2), (-1.0, -0.5), -1.5, is_greedy=False)]


def test_a_lead_is_that_over_all_others_together() -> None:
    found = leads(np.array([[-0.1, -3.0, -9.0, -9.0, -9.0], [-1.0, -1.0, -2.0, -2.0, -2.0]]))
    assert found == pytest.approx([2.9 - math.log(4), -math.log(4)])


@pytest.mark.parametrize(("ahead", "are_same"), [(1, True), (2, True), (3, False)])
def test_the_same_words_may_be_spelt_in_two_tokens_more(ahead: int, are_same: bool) -> None:
    beam = BeamSearch(WIDTH, 30, END)
    earned = Match(earned=1.0)  # by a keyword before
    short = Hypothesis((1, 2, 7, 8), (-0.5,) * 4, -2.0)
    long = Hypothesis(
        (1, 2, 7, 8, *range(3, 3 + ahead)), (-0.5,) * (4 + ahead), -1.0 - ahead / 2, match=earned
    )
    for one, other in ((short, long), (long, short)):
        lead = beam._lead(one, other)
        assert (lead is not None) is are_same
        if lead is not None:
            sign = -1 if one is short else 1
            allowed = ahead * 0.5 * one.sum_logprob / len(one.tokens)
            assert lead == pytest.approx(sign * (1 + allowed))


def test_two_equal_tokens_at_the_end_make_hypotheses_the_same_and_one_does_not() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    one, other = Hypothesis((1, 7, 8), (-0.5,) * 3, -1.5), Hypothesis((2, 7, 8), (-0.7,) * 3, -2.1)
    assert beam._lead(one, other) == pytest.approx(0.6)
    assert beam._lead(one, other._replace(tokens=(2, 6, 8))) is None
    assert beam._lead(Hypothesis((8,), (-0.5,), -0.5), other) is None, "too short to know"
    assert beam._lead(Hypothesis((7, 8), (-0.5,) * 2, -1.0), other) == pytest.approx(1.1)
    assert beam._lead(one, Hypothesis((7, 8, 3, 4), (-0.5,) * 4, -2.0)) is None, "one token is ahead of it"
    assert BeamSearch(WIDTH, 30, END, margin=math.inf)._lead(one, other) is None, "openai-whisper's"


def test_a_text_is_scored_by_the_root_of_its_length() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert beam._score(Hypothesis((1, 2, 3, 4), (), -3.0)) == -1.5
    assert beam._score(Hypothesis((), (), -3.0)) == -3.0
    exact = BeamSearch(WIDTH, 30, END, margin=math.inf)
    assert exact._score(Hypothesis((1, 2, 3, 4), (), -3.0)) == -0.75


def test_running_texts_count_as_far_as_places_are_left_by_those_that_ended() -> None:
    beam = BeamSearch(2, 30, END)
    beam.ended = [Hypothesis((1,), (-3.0,), -3.0, is_ended=True)]
    beam.running = [Hypothesis((2,), (-4.0,), -4.0), Hypothesis((3,), (-1.0,), -1.0)]
    assert beam.best().tokens == (1,), "the second has no place"
    beam.running = [Hypothesis((3,), (-1.0,), -1.0), Hypothesis((2,), (-4.0,), -4.0)]
    assert beam.best().tokens == (3,)
    beam.running = [beam.running[0]._replace(is_tentative=True)]
    assert beam.best().tokens == (1,)
    beam.running = [Hypothesis((3,), (-0.5,), -0.5)]
    beam.ended *= 2
    assert beam.best().tokens == (1,), "no place is left"
    beam.running, beam.ended = [], []
    assert math.isnan(beam.best().sum_logprob)


def test_a_hypothesis_far_below_an_ended_text_goes_on_if_it_is_better_for_its_length() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    beam.ended = [Hypothesis((1,), (-2.0,), -2.0, is_ended=True)]
    assert not beam._has_lost(Hypothesis((1, 2), (), -3.5)), "within the margin"
    assert beam._has_lost(Hypothesis((1, 2), (), -3.6))
    assert not beam._has_lost(Hypothesis((1, 2, 3, 4), (), -3.6)), "-1.8 by the root of its length"
    assert not beam._has_lost(Hypothesis((1, 2, 3, 4), (), -4.0)), "as good for its length"
    beam.ended = []
    assert not beam._has_lost(Hypothesis((1, 2), (), -99.0))


def test_hypotheses_change_their_places() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    read_on(beam, {1: 0.4, 2: 0.3, 3: 0.3})
    beam.reorder([2, 0, 1])
    assert [each.tokens for each in beam.running] == [(3,), (1,), (2,)]


def test_what_lies_exactly_at_the_margin_is_kept_and_is_not_sure() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert not beam.best().is_ended
    assert not beam.append_if_sure(1, -0.1, 1.5)
    assert beam.advance([[(1, -0.5), (2, -2.0)]]) == [0, 0]


def test_no_more_texts_end_than_the_search_is_wide() -> None:
    beam = BeamSearch(2, 30, END)
    read_on(beam, {1: 0.5, 2: 0.4})
    beam.ended = [Hypothesis((5,), (-0.1,), -0.2, is_ended=True)]
    assert read_on(beam, {END: 0.9}, {END: 0.9}) == []
    assert [each.tokens for each in beam.ended] == [(5,), (1,)]


@pytest.mark.parametrize(("lead", "kept"), [(0.0, 2), (0.5, 1), (-0.5, 2)])
def test_the_likelier_of_two_that_are_the_same_goes_on_for_the_greedy_one(lead: float, kept: int) -> None:
    beam = BeamSearch(WIDTH, 30, END)
    beam.running = [
        Hypothesis((1, 3), (-0.5, -0.5), -1.0 + lead, is_greedy=False),
        Hypothesis((2, 3), (-0.5, -0.5), -1.0),
    ]
    parents = beam.advance([[(4, -0.5)], [(4, -0.5)]])
    assert parents == [kept - 1]
    assert [(each.tokens, each.is_greedy) for each in beam.running] == [((kept, 3, 4), True)]


def test_the_end_of_a_text_is_no_time() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert read_on(beam, {1: 0.35, END + 1: 0.3, END: 0.3}) == [(1,), (END + 1,)]
    assert beam.running[1].sum_logprob == pytest.approx(math.log(0.3))
    assert [each.tokens for each in beam.ended] == [()]


def test_a_segment_that_would_begin_where_the_audio_ends_does_not() -> None:
    beam = BeamSearch(WIDTH, 30, END, audio_end=END + 5)
    read_on(beam, {1: 0.9})
    read_on(beam, {END + 3: 0.9})
    assert read_on(beam, {END + 5: 0.6}) == []
    assert [each.tokens for each in beam.ended] == [(1, END + 3)]


def test_times_that_are_impossible_or_together_nearly_sure_are_one_or_none() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert beam.advance([[(1, -0.1), (END + 1, -math.inf)]]) == [0]
    beam = BeamSearch(WIDTH, 30, END)
    beam.advance([[(END + 1, 0.0), (END + 2, -3.0)]])
    assert beam.running == [Hypothesis((END + 1,), (0.0,), 0.0)], "rounding makes nothing likelier than sure"
