"""Keywords in a search: a complete one wins, an unfinished one costs no other text its place."""

import math
import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.engine import boost
from asr_server.engine.beam import NUM_NAMED, NUM_RESERVED, BeamSearch, Hypothesis, leads, num_candidates
from asr_server.engine.boost import KeywordBoost, Row
from harness.engine_helpers import Checkpoint, transcribe
from tests.support.real_weights import hugging_face_checkpoint
from tests.unit.engine.test_beam import (
    END,
    WIDTH,
    found,
    next_candidates,
    next_logprobs,
    read_on,
    results_of_mixed,
)
from tests.unit.engine.test_engine import CLIPS, MIXED

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


KEYWORDS = ("Szymborska", "Llandudno", "Okonkwo", "Ada Lovelace", "one two three")  # of several tokens
# And of one: behind a word random weights write a timestamp, so that they complete no other.
BRIEF_KEYWORDS = (*KEYWORDS, "Monday", "water", "street")


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
@pytest.mark.parametrize(
    ("beam_size", "lookahead"), [pytest.param(1, True, marks=pytest.mark.trial), (WIDTH, False)]
)
def test_keywords_change_their_own_text_alone_and_the_same_in_any_company(
    pocket: Checkpoint, beam_size: int, lookahead: bool
) -> None:
    engines = [pocket.engine(num_slots=1, beam_size=beam_size) for _ in CLIPS]
    alone = [transcribe(*each)[0] for each in zip(engines, [[c] for c in CLIPS], BOOSTED, strict=True)]
    plain = results_of_mixed(pocket.engine(beam_size=beam_size), MIXED)
    assert tokens_of(alone)[::2] == tokens_of(plain)[::2]
    assert tokens_of(alone)[1::2] != tokens_of(plain)[1::2]
    assert all(logprob <= 0 for result in alone for logprob in result.logprobs)
    found = results_of_mixed(pocket.engine(num_slots=3, beam_size=beam_size, lookahead=lookahead), BOOSTED)
    assert tokens_of(found) == tokens_of(alone)
    averages = [result.avg_logprob for result in alone]
    assert [result.avg_logprob for result in found] == pytest.approx(averages, abs=1e-4)


def test_a_retry_at_a_temperature_has_no_bonus(pocket: Checkpoint) -> None:
    options = DecodingOptions(language="de", max_new_tokens=8, temperatures=(0.6,), seed=5)
    boosted = msgspec.structs.replace(options, keywords=KEYWORDS)
    found, plain = (transcribe(pocket.engine(), CLIPS[:2], each) for each in (boosted, options))
    assert tokens_of(found) == tokens_of(plain)


@pytest.mark.trial
@pytest.mark.parametrize("beam_size", [1, WIDTH])
def test_whisper_base_writes_a_rare_name_as_its_keyword_spells_it(beam_size: int) -> None:
    from harness.speech.synthesis import is_installed
    from harness.speech.synthesis import say as say_text

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
