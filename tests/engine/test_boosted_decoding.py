"""Keywords in the engine: they win where the model is in doubt, change nobody else, and leave its figures."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.engine import boost
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import NUM_NAMED, NUM_RESERVED, BeamSearch, Hypothesis, leads, num_candidates
from asr_server.engine.boost import FIRST_BONUS, KeywordBoost, Row
from asr_server.engine.ranks import Decode
from asr_server.engine.runner import StepPlan
from asr_server.engine.tokens import Named, choose_boosted, likeliest_named, padded_rows, top_scores
from benchmarks.engine_helpers import Checkpoint, results, submit, transcribe
from tests.engine.device_stand_ins import imitate_late_device
from tests.engine.test_beam import END, WIDTH, next_candidates, next_logprobs, results_of_mixed
from tests.engine.test_engine import CLIPS, MIXED
from tests.real_weights import hugging_face_checkpoint
from tests.speech import say

KEYWORDS = ("Szymborska", "Llandudno", "Okonkwo", "Ada Lovelace", "one two three")  # of several tokens
# And of one: behind a word random weights write a timestamp, so that they complete no other.
BRIEF_KEYWORDS = (*KEYWORDS, "Monday", "water", "street")


# -- The choice of a token --------------------------------------------------------------------------------


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


def test_other_ranks_are_sent_the_rows_of_keywords() -> None:
    row = Row((5, 7), (1.0, 3.0))
    plan = StepPlan(2, 9, boosted=((1, row),), named=((0, row),))
    encoded = msgspec.msgpack.encode(Decode(plan))
    assert msgspec.msgpack.decode(encoded, type=Decode).plan == plan


# -- The search -------------------------------------------------------------------------------------------


def machine(*keywords: tuple[int, ...]) -> KeywordBoost:
    return KeywordBoost(keywords, (), lambda token: False)


def read_on(beam: BeamSearch, *following: dict[int, float]) -> list[tuple[int, ...]]:
    """Go on with next tokens of these probabilities, for each hypothesis; return the texts."""
    beam.advance([[(token, math.log(p)) for token, p in each.items()] for each in following])
    return [each.tokens for each in beam.running]


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


def test_in_a_full_search_the_least_likely_texts_leave_their_places_to_a_match() -> None:
    beam = BeamSearch(WIDTH, 30, END, boost=machine((2, 3, 4, 7)))
    likely = {1: 0.24, 5: 0.2, 6: 0.17, 8: 0.15, 4: 0.13}
    assert read_on(beam, {**likely, 2: 0.1}) == [(1,), (5,), (6,), (8,), (2,)]
    assert read_on(beam, likely, *[{1: 0.9}] * 3, {3: 0.9})[-1] == (2, 3)
    assert len(beam.running) == WIDTH


def test_a_token_is_not_sure_where_a_keyword_s_is_close_with_its_bonus() -> None:
    for bonus, is_sure in ((FIRST_BONUS, True), (9.0, False)):
        own = machine((2, 3))
        own._states[2].gain = bonus
        beam = BeamSearch(WIDTH, 30, END, boost=own)
        others = [(4, math.log(0.004)), (2, math.log(0.003))]
        assert beam.append_if_sure(1, math.log(0.99), 5.0, others) == is_sure
        assert bool(beam.running[0].tokens) == is_sure


# -- A search of a model made of chance -------------------------------------------------------------------

Lists = list[list[tuple[int, float]]]


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
    for seed in range(300):
        (plain, seen_without), (found, seen) = search(None, seed), search(chance_keywords(seed), seed)
        if "complete" in seen:
            num_complete += bool(found.match.earned)
            continue
        if "wide" in seen_without:
            continue
        assert found[:3] == plain[:3]
        num_unfinished += "tentative" in seen
    assert num_unfinished > 10
    assert num_complete > 20


@pytest.mark.parametrize("seed", range(20))
def test_the_model_s_own_log_probabilities_are_reported(seed: int) -> None:
    best, _ = search(chance_keywords(seed), seed)
    expected = [float(next_logprobs(best.tokens[:at], seed)[token]) for at, token in enumerate(best.tokens)]
    assert best.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_sure_search_with_keywords_appends_what_comparing_all_tokens_would_keep() -> None:
    num_sure = 0
    for seed in range(200):
        chance, own = random.Random(seed), chance_keywords(seed)
        fast, plain = (BeamSearch(WIDTH, 12, END, boost=own) for _ in range(2))
        while not plain.is_over:
            rows = [next_candidates(chance) for _ in plain.running]
            lists = [list(zip(map(int, row[0]), row[1], strict=True)) for row in rows]
            named = [
                [(token, chance.uniform(-12, -6)) for token in own.row(each.match.state).tokens[:NUM_NAMED]]
                for each in plain.running
            ]
            token, logprob = lists[0][0]
            (lead, *_) = leads(np.array([row[1] for row in rows]))
            is_sure = fast.append_if_sure(token, logprob, lead, [*lists[0][1:], *named[0]])
            parents = [0] if is_sure else fast.advance(lists, named)
            assert parents == plain.advance(lists, named)
            assert (fast.running, fast.ended) == (plain.running, plain.ended)
            num_sure += is_sure
    assert num_sure > 100


# -- In the engine ----------------------------------------------------------------------------------------


@pytest.fixture
def strong(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bonuses by which random weights write keywords."""
    boost.keyword_boost.cache_clear()
    monkeypatch.setattr(boost, "FIRST_BONUS", 20.0)
    monkeypatch.setattr(boost, "NEXT_BONUS", 20.0)
    yield
    boost.keyword_boost.cache_clear()


BOOSTED = [
    msgspec.structs.replace(options, keywords=BRIEF_KEYWORDS if number % 2 else ())
    for number, options in enumerate(MIXED)
]


def tokens_of(found: list[ChunkResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in found]


@pytest.mark.slow
@pytest.mark.usefixtures("strong")
@pytest.mark.parametrize("beam_size", [1, WIDTH])
def test_keywords_change_their_own_text_alone_and_the_same_in_any_company(
    pocket: Checkpoint, beam_size: int
) -> None:
    engines = [pocket.engine(num_slots=1, beam_size=beam_size) for _ in CLIPS]
    alone = [transcribe(*each)[0] for each in zip(engines, [[c] for c in CLIPS], BOOSTED, strict=True)]
    plain = results_of_mixed(pocket.engine(beam_size=beam_size), MIXED)
    assert tokens_of(alone)[::2] == tokens_of(plain)[::2]
    assert tokens_of(alone)[1::2] != tokens_of(plain)[1::2]
    assert all(logprob <= 0 for result in alone for logprob in result.logprobs)
    for lookahead in (False, True):
        found = results_of_mixed(
            pocket.engine(num_slots=3, beam_size=beam_size, lookahead=lookahead), BOOSTED
        )
        assert tokens_of(found) == tokens_of(alone), lookahead
        averages = [result.avg_logprob for result in alone]
        assert [result.avg_logprob for result in found] == pytest.approx(averages, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("strong")
def test_with_lookahead_the_bonus_is_that_of_the_text_so_far(pocket: Checkpoint) -> None:
    options = msgspec.structs.replace(MIXED[1], keywords=KEYWORDS)
    found, plain = (
        tokens_of(transcribe(pocket.engine(lookahead=lookahead), CLIPS[:4], options))
        for lookahead in (True, False)
    )
    assert found == plain


@pytest.mark.usefixtures("strong")
def test_keywords_leave_lookahead_to_all(pocket: Checkpoint) -> None:
    engine, plain = pocket.engine(lookahead=True), MIXED[1]
    submit(engine, "plain", CLIPS[0], plain)
    submit(engine, "boosted", CLIPS[1], msgspec.structs.replace(plain, keywords=KEYWORDS))
    while not results(engine.step()):
        if engine.num_decode_steps > 1:
            assert engine._loop._in_flight is not None


@pytest.mark.parametrize(("state", "guess"), [(0, 1), (1, 1), (2, 3), (3, 1)])
def test_a_keyword_is_guessed_to_go_on_and_another_word_to_have_no_end(state: int, guess: int) -> None:
    assert machine((2, 3)).guess(state) == guess


def test_a_guess_that_adds_the_same_is_not_wrong() -> None:
    for unspaced, is_wrong in (((), False), ((7,), True)):
        own = KeywordBoost([(2, 3)], [unspaced], lambda token: True)
        chunk = ActiveChunk(ChunkId("", 0), CLIPS[0], MIXED[1], "de", slots=[4], max_tokens=9, boost=own)
        ((slot, row),) = chunk.boost_rows(has_unread=True)
        assert (slot, row) == (4, own.row(1))
        assert chunk.append(5, -1.0, 100) is None
        assert chunk.boost_states == [KeywordBoost.start]
        assert chunk.has_guessed_wrong() == is_wrong


@pytest.mark.slow
@pytest.mark.usefixtures("strong")
def test_keywords_are_the_same_on_a_device_that_is_late(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results_of_mixed(pocket.engine(beam_size=WIDTH), BOOSTED)
    imitate_late_device(monkeypatch, 0)
    found = results_of_mixed(pocket.engine(num_slots=4, beam_size=WIDTH), BOOSTED)
    assert tokens_of(found) == tokens_of(expected)


def test_a_retry_at_a_temperature_has_no_bonus(pocket: Checkpoint) -> None:
    options = DecodingOptions(language="de", max_new_tokens=8, temperatures=(0.6,), seed=5)
    boosted = msgspec.structs.replace(options, keywords=KEYWORDS)
    found, plain = (transcribe(pocket.engine(), CLIPS[:2], each) for each in (boosted, options))
    assert tokens_of(found) == tokens_of(plain)


@pytest.mark.trial
@pytest.mark.parametrize("beam_size", [1, WIDTH])
def test_whisper_base_writes_a_rare_name_as_its_keyword_spells_it(beam_size: int) -> None:
    from benchmarks.speech.synthesis import is_installed
    from benchmarks.speech.synthesis import say as say_text

    if not is_installed():
        pytest.skip("the voice that reads aloud is not installed")
    checkpoint = Checkpoint.load(hugging_face_checkpoint("base"))
    spoken = [
        say_text(f"Please write to {name} before the end of the week.")
        for name in ("Castellano", "Quillfeather")
    ]
    options = DecodingOptions(language="en")
    boosted = msgspec.structs.replace(options, keywords=("Castellano", "Quillfeather"))
    engine = checkpoint.engine(beam_size=beam_size, short_audio="tail")
    plain, found = (
        " ".join(checkpoint.tokenizer.decode(each.tokens) for each in transcribe(engine, spoken, own))
        for own in (options, boosted)
    )
    assert "Castellano" not in plain
    assert "Quillfeather" not in plain
    assert "Castellano" in found
    assert "Quillfeather" in found


def test_digits_that_are_sure_are_read_as_before(embedded: Checkpoint) -> None:
    spoken = [say(digits).samples for digits in ("407", "98653", "12")]
    plain, boosted = DecodingOptions(), DecodingOptions(keywords=("one", "eleven", "seven of nine"))
    for beam_size in (1, WIDTH):
        engine = embedded.engine(beam_size=beam_size)
        assert tokens_of(transcribe(engine, spoken, boosted)) == tokens_of(transcribe(engine, spoken, plain))
