"""The bonus of keywords as a state machine: earned token by token, given back where a match breaks off."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.engine.boost import FIRST_BONUS, NEXT_BONUS, KeywordBoost, Match, keyword_boost
from tests.support.real_weights import real_checkpoint
from tests.support.tokens import make_tokenizer, spell

A, B, C, D, COMMA, TIME = 1, 2, 3, 4, 10, 99


def machine(*spaced: Sequence[int], unspaced: Sequence[Sequence[int]] = ()) -> KeywordBoost:
    return KeywordBoost(spaced, unspaced, lambda token: token >= COMMA)


def states(boost: KeywordBoost, tokens: Sequence[int]) -> list[int]:
    return list(accumulate(tokens, boost.step, initial=boost.start))


def total(boost: KeywordBoost, tokens: Sequence[int]) -> float:
    """The bonus of a text that ends behind these tokens."""
    at = states(boost, tokens)
    steps = zip(at[:-1], tokens, strict=True)
    gained = sum(boost.bonus(state, token) - boost.potential(state) for state, token in steps)
    return gained - boost.potential(at[-1])


@pytest.mark.parametrize(
    ("keywords", "text", "num_rewarded"),
    [
        *(([[A, B, C]], text, 3) for text in ([A, B, C], [A, B, C, D], [A, A, B, C])),
        *(([[A, B, C]], text, 0) for text in ([A, B, D], [A, B], [A, D])),  # it breaks off
        *(([[A, B], [A, B, C, D]], text, 2) for text in ([A, B], [A, B, C, B])),  # one begins with the other
        ([[A, B, C], [D, B]], [A, B, D, B], 2),  # one begins where the other breaks off
    ],
)
def test_each_token_of_a_complete_match_keeps_its_bonus(
    keywords: list[list[int]], text: list[int], num_rewarded: int
) -> None:
    boost = machine(*keywords)
    assert total(boost, text) == bool(num_rewarded) * (FIRST_BONUS + (num_rewarded - 1) * NEXT_BONUS)


def test_what_a_match_has_earned_is_kept_back_until_it_is_complete() -> None:
    boost = machine([A, B, C])
    assert [boost.potential(state) for state in states(boost, [A, B, C])[2:]] == [FIRST_BONUS + NEXT_BONUS, 0]
    longer = machine([A, B], [A, B, C, D])
    assert longer.potential(states(longer, [A, B, C])[-1]) == NEXT_BONUS


def test_a_text_earns_the_bonus_when_the_keyword_is_complete() -> None:
    boost = machine([A, B, C])
    *_, pending, complete, after = accumulate([A, B, C, D], boost.follow, initial=Match())
    assert (pending.earned, pending.pending) == (0, FIRST_BONUS + NEXT_BONUS)
    assert (complete.earned, complete.pending) == (FIRST_BONUS + 2 * NEXT_BONUS, 0)
    assert after[1:] == complete[1:]


def test_without_a_space_a_match_begins_at_the_start_of_a_word_alone() -> None:
    boost = machine(unspaced=[[A, B]])
    assert total(boost, [A, B]) == total(boost, [C, TIME, A, B]) == total(boost, [C, COMMA, A, B]) > 0
    assert total(boost, [C, A, B]) == 0
    assert boost.row(states(boost, [C])[-1]).tokens == ()


def test_no_order_of_tokens_earns_more_than_its_complete_matches() -> None:
    """Texts of chance: what is left of every match that is not complete is nothing."""
    chance = random.Random(1)
    boost = machine([A, B, C], [B, D])
    for _ in range(300):
        text = [chance.choice((A, B, C, D)) for _ in range(12)]
        joined = "".join(map(str, text))
        most = joined.count("123") * (FIRST_BONUS + 2 * NEXT_BONUS)
        most += joined.count("24") * (FIRST_BONUS + NEXT_BONUS)
        *_, last = accumulate(text, boost.follow, initial=Match())
        assert last.earned == total(boost, text)
        assert 0 <= last.earned <= most


def test_a_keyword_is_matched_with_a_space_before_it_and_without() -> None:
    boost = keyword_boost(make_tokenizer(), ("seven",))
    assert total(boost, spell(" seven")) == FIRST_BONUS + 5 * NEXT_BONUS
    assert total(boost, spell("seven")) == FIRST_BONUS + 4 * NEXT_BONUS
    assert total(boost, spell("(seven")) > 0
    assert total(boost, spell("xseven")) == 0


@pytest.mark.parametrize("spelling", ["mcDonald", "mcdonald", "McDonald"])
def test_a_keyword_is_matched_as_it_is_written_in_lower_case_and_with_a_capital(spelling: str) -> None:
    boost = keyword_boost(make_tokenizer(), ("mcDonald",))
    assert total(boost, spell(f" {spelling}")) == FIRST_BONUS + 8 * NEXT_BONUS
    assert total(boost, spell(" MCDONALD")) == total(boost, spell(" CcDonald")) == 0


class Pieces:
    """A tokenizer that takes the longest piece that the rest of a text begins with."""

    def __init__(self, *pieces: str) -> None:
        text = "".join(pieces)
        letters = sorted(set(text + text.lower()))
        self.pieces = sorted([*pieces, *letters], key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            tokens.append(next(i for i, piece in enumerate(self.pieces) if text.startswith(piece)))
            text = text.removeprefix(self.pieces[tokens[-1]])
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in tokens)


def test_a_keyword_may_begin_with_a_shorter_piece_of_three_letters_or_more() -> None:
    """A piece of its own, if no more tokens follow than the keyword has."""
    ours = Pieces(" Kubern", "etes", " K", " Ku", " Kub", "ernetes", " Kube", "Kubernetes")
    tokenizer: Any = ours
    boost = keyword_boost(tokenizer, ("Kubernetes",))
    first = {ours.pieces[token] for token in boost.row(KeywordBoost.start).tokens}
    assert {piece for piece in first if piece.startswith(" K")} == {" Kubern", " Kub", " Ku"}
    for pieces in ([" Kubern", "etes"], [" Kub", "ernetes"], [" Ku", "b", "ernetes"]):
        tokens = [ours.pieces.index(piece) for piece in pieces]
        assert total(boost, tokens) == FIRST_BONUS + (len(tokens) - 1) * NEXT_BONUS
    for pieces in ([" Kube", "r", "n", "etes"], [" K", "u", "b", "ernetes"]):
        assert total(boost, [ours.pieces.index(piece) for piece in pieces]) == 0


@pytest.mark.parametrize(
    ("letter", "is_anywhere"),
    [
        *(("\u0dff", False), ("\u0e00", True), ("\u109f", True), ("\u10a0", False), ("\u1fff", False)),
        *(("\u2000", True), ("\uabff", True), ("\uac00", False), ("\ud7ff", False), ("\ue000", True)),
    ],
)
def test_the_first_letters_script_decides_where_a_keyword_begins(letter: str, is_anywhere: bool) -> None:
    boost = keyword_boost(make_tokenizer(), (f"{letter}a",))
    assert (total(boost, spell(f"x{letter}a")) > 0) is is_anywhere
    assert total(keyword_boost(make_tokenizer(), (f"a{letter}",)), spell(f"xa{letter}")) == 0


@pytest.mark.parametrize(("state", "guess"), [(0, 1), (1, 1), (2, 3), (3, 1)])
def test_a_keyword_is_guessed_to_go_on_and_another_word_to_have_no_end(state: int, guess: int) -> None:
    assert machine((2, 3)).guess(state) == guess


@pytest.mark.parametrize("text", ["Kubernetes", "kubernetes", "a Kubernetes", "a kubernetes", "(Kubernetes"])
def test_of_published_tokens_every_case_and_place_of_a_keyword_is_matched(text: str) -> None:
    tokenizer = Tokenizer.from_directory(real_checkpoint("base"))
    boost = keyword_boost(tokenizer, ("Kubernetes", "Ada Lovelace"))
    at = states(boost, tokenizer.encode(text))
    assert boost.potential(at[-1]) == 0
    assert total(boost, tokenizer.encode(text)) > 0


def test_of_published_tokens_a_keyword_begun_with_a_shorter_token_is_matched() -> None:
    tokenizer = Tokenizer.from_directory(real_checkpoint("base"))
    boost = keyword_boost(tokenizer, ("Grafana",))
    split = [*tokenizer.encode(" Gr"), *tokenizer.encode("afana")]
    assert split != tokenizer.encode(" Grafana")
    assert boost.potential(states(boost, split)[-1]) == 0
    assert total(boost, split) > 0
