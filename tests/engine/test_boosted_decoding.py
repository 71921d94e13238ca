"""Keywords in the engine: they win where the model is in doubt, change nobody else, and leave its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.engine import boost
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import BeamSearch, leads, num_candidates
from asr_server.engine.boost import FIRST_BONUS, KeywordBoost, Row
from asr_server.engine.ranks import Decode
from asr_server.engine.runner import StepPlan
from asr_server.engine.tokens import choose_boosted, padded_rows, top_scores
from benchmarks.engine_helpers import Checkpoint, results, submit, transcribe
from tests.engine.device_stand_ins import imitate_late_device
from tests.engine.test_beam import END, VOCABULARY, WIDTH, next_logprobs, results_of_mixed
from tests.engine.test_engine import CLIPS, MIXED
from tests.real_weights import hugging_face_checkpoint
from tests.speech import say

KEYWORDS = ("Szymborska", "Llandudno", "Okonkwo", "Ada Lovelace", "one two three")  # of several tokens


# -- The choice of a token --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 4])
def test_the_choice_is_that_of_adding_every_bonus_to_all_scores(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randn(40, 60, generator=generator) * 3
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -math.inf
    rows = [
        Row(tuple(torch.randperm(60, generator=generator)[: number % 9].tolist()), (2.5,) * (number % 9))
        for number in range(len(scores))
    ]
    plain, dense = scores.log_softmax(-1), scores.log_softmax(-1)
    for number, row in enumerate(rows):
        dense[number, list(row.tokens)] += torch.tensor(row.bonuses)
    logprobs, tokens = top_scores(plain, 1)
    largest, likeliest = plain.topk(max(1, count))
    candidates = torch.cat([likeliest.float(), largest], 1).t()[: 2 * count]
    found = choose_boosted(scores, tokens[:, 0], logprobs[:, 0], candidates, *padded_rows(rows))
    assert torch.equal(found[0], dense.argmax(-1))
    torch.testing.assert_close(found[1], plain.gather(1, found[0][:, None])[:, 0])
    torch.testing.assert_close(
        found[2][count:].t(), dense.topk(count).values if count else torch.empty(40, 0)
    )
    if count:
        named = dense.gather(1, found[2][:count].t().long())
        torch.testing.assert_close(named, found[2][count:].t())


def test_a_token_that_the_rules_forbid_is_not_chosen_for_its_bonus() -> None:
    scores = torch.tensor([[0.0, -math.inf, 1.0]])
    tokens, logprobs = torch.tensor([2]), scores.log_softmax(-1)[:, 2]
    row = padded_rows([Row((1,), (99.0,))])
    assert choose_boosted(scores, tokens, logprobs, torch.empty(0, 1), *row)[0].tolist() == [2]


def test_other_ranks_are_sent_the_rows_of_keywords() -> None:
    plan = StepPlan(2, 9, boosted=((1, Row((5, 7), (1.0, 3.0))),))
    encoded = msgspec.msgpack.encode(Decode(plan))
    assert msgspec.msgpack.decode(encoded, type=Decode).plan == plan


# -- The search -------------------------------------------------------------------------------------------


def machine(*keywords: tuple[int, ...]) -> KeywordBoost:
    return KeywordBoost(keywords, (), lambda token: False)


def read_on(beam: BeamSearch, own: KeywordBoost, *following: dict[int, float]) -> list[tuple[int, ...]]:
    """Go on with next tokens of these probabilities, for each hypothesis; return the texts."""
    beam.advance(
        [
            sorted(
                ((token, math.log(p) + own.bonus(each.state, token)) for token, p in probabilities.items()),
                key=lambda candidate: -candidate[1],
            )
            for each, probabilities in zip(beam.running, following, strict=True)
        ]
    )
    return [each.tokens for each in beam.running]


def test_a_keyword_that_is_complete_wins_over_a_likelier_text() -> None:
    own = machine((2, 3))
    beam = BeamSearch(WIDTH, 30, END, boost=own)
    assert read_on(beam, own, {1: 0.9, 2: 0.1}) == [(1,), (2,)]
    read_on(beam, own, {4: 0.9}, {3: 0.9})
    assert read_on(beam, own, {5: 0.9}, {6: 0.9}) == [(1, 4, 5), (2, 3, 6)]
    read_on(beam, own, {END: 0.9}, {END: 0.9})
    assert beam.best().tokens == (2, 3, 6)
    assert beam.best().sum_logprob - sum(beam.best().bonuses) == pytest.approx(math.log(0.1 * 0.9**3))
    assert beam.best().model_logprobs == pytest.approx([math.log(p) for p in (0.1, 0.9, 0.9)])


def test_a_keyword_that_breaks_off_leaves_the_model_its_own_text() -> None:
    """Its bonus is so large that the text without would be pruned, were it not the model's own."""
    own = machine((2, 3, 4, 7))
    beam = BeamSearch(WIDTH, 30, END, boost=own)
    assert read_on(beam, own, {1: 0.6, 2: 0.4}) == [(1,), (2,)], "the second is the likelier with its bonus"
    assert read_on(beam, own, {5: 0.9}, {3: 0.9}) == [(1, 5), (2, 3)]
    assert read_on(beam, own, {6: 0.9}, {4: 0.9}) == [(1, 5, 6), (2, 3, 4)]
    read_on(beam, own, {END: 0.9}, {END: 0.9})
    assert beam.best().tokens == (1, 5, 6)
    assert [sum(text.bonuses) for text in beam.ended if text.tokens[0] == 2] == [0.0]


def test_a_keyword_that_is_not_complete_prunes_no_other_text() -> None:
    own = machine((2, 3, 4, 7))
    beam = BeamSearch(WIDTH, 30, END, boost=own)
    assert read_on(beam, own, {1: 0.4, 5: 0.3, 2: 0.3}) == [(1,), (2,), (5,)]
    assert read_on(beam, own, {6: 0.9}, {3: 0.9}, {8: 0.9}) == [(1, 6), (2, 3), (5, 8)]


def test_a_token_that_is_likeliest_by_its_bonus_alone_is_not_sure() -> None:
    own = machine((2, 3))
    for probability, is_sure in ((0.2, False), (0.999, True)):
        beam = BeamSearch(WIDTH, 30, END, boost=own)
        logprobs = [math.log(probability) + 9, math.log(1 - probability)]
        own._states[2].gain = 9.0
        (lead,) = leads(np.array([logprobs]))
        assert lead > 5
        assert beam.append_if_sure(2, logprobs[0], lead) == is_sure
        assert bool(beam.running[0].tokens) == is_sure


@pytest.mark.parametrize("seed", range(20))
def test_of_a_model_made_of_chance_its_own_log_probabilities_are_reported(seed: int) -> None:
    own = machine((1, 2, 3), (4, 5), (6, 7, 8, 1))
    beam = BeamSearch(WIDTH, 12, END, boost=own)
    while not beam.is_over:
        lists = []
        for each in beam.running:
            scores = next_logprobs(each.tokens, seed).double()
            scores += torch.tensor([own.bonus(each.state, token) for token in range(VOCABULARY)])
            top = scores.topk(num_candidates(WIDTH))
            lists.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        beam.advance(lists)
    best = beam.best()
    expected = [float(next_logprobs(best.tokens[:at], seed)[token]) for at, token in enumerate(best.tokens)]
    assert best.model_logprobs == pytest.approx(expected, abs=1e-5)
    assert sum(best.bonuses) % FIRST_BONUS == 0


# -- In the engine ----------------------------------------------------------------------------------------


@pytest.fixture
def strong(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bonuses by which random weights write keywords."""
    boost.keyword_boost.cache_clear()
    monkeypatch.setattr(boost, "FIRST_BONUS", 4.0)
    monkeypatch.setattr(boost, "NEXT_BONUS", 8.0)
    yield
    boost.keyword_boost.cache_clear()


BOOSTED = [
    msgspec.structs.replace(options, keywords=KEYWORDS if number % 2 else ())
    for number, options in enumerate(MIXED)
]


def tokens_of(found: list[ChunkResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in found]


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
