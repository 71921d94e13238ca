"""Which words of a growing turn are stable, and which tokens belong to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_server.annexes.realtime.turn_types import Agreement, agree, conclude, tokens_between
from asr_server.core import TokenLogprob

WORDS = st.lists(st.sampled_from(["one", "two", "three"]), max_size=6).map(" ".join)


def test_punctuation_and_capitals_are_no_disagreement() -> None:
    agreement, _ = agree(Agreement(), "one two", None)
    assert agree(agreement, "One, two. Three", None)[1] == "One, two."


def test_characters_agree_where_there_are_no_words() -> None:
    agreement, _ = agree(Agreement(), "你好吗", "zh")
    agreement, text = agree(agreement, "你好嘛", "zh")
    assert text == "你好"
    assert conclude(agreement, "你好吗", "zh") == "吗"


@given(st.lists(WORDS, max_size=6), WORDS)
def test_as_many_words_are_sent_as_are_final_or_were_stable(readings: list[str], final: str) -> None:
    agreement, sent = Agreement(), []
    for reading in readings:
        agreement, text = agree(agreement, reading, None)
        sent += text.split()
    assert len(sent) == agreement.num_sent
    rest = conclude(agreement, final, None).split()
    assert len(sent) + len(rest) == max(len(sent), len(final.split()))
    assert rest == final.split()[len(sent) :]


def test_what_was_sent_stays_sent_when_a_later_reading_disagrees_or_is_shorter() -> None:
    agreement = Agreement()
    sent = []
    for reading in ("one two three", "one two three", "one too", "one two three four", "one two three four"):
        agreement, text = agree(agreement, reading, "en")
        sent.append(text)
    assert sent == ["", "one two three", "", "", "four"]
    assert agreement.num_sent == 4


def token(text: str) -> TokenLogprob:
    return TokenLogprob(text, -0.1, tuple(text.encode()))


TOKENS = tuple(map(token, (" one", " tw", "o", ",", " drei", " ü", "ber")))


@pytest.mark.parametrize(
    ("first", "end", "tokens"),
    [
        (0, None, TOKENS),
        (0, 0, ()),
        (0, 1, TOKENS[:1]),
        (0, 2, TOKENS[:4]),
        (1, 2, TOKENS[1:4]),
        (2, 2, ()),
        (2, 3, TOKENS[4:5]),
        (2, None, TOKENS[4:]),
        (4, None, ()),
        (5, None, ()),  # the final text has fewer words than were sent
    ],
)
def test_tokens_belong_to_the_word_that_they_end_in(
    first: int, end: int | None, tokens: tuple[TokenLogprob, ...]
) -> None:
    assert tokens_between("one two, drei über", "de", TOKENS, first, end) == tokens


def test_a_token_behind_the_last_word_comes_with_the_rest() -> None:
    tokens = (*map(token, (" one", " ")),)
    assert tokens_between("one ", "en", tokens, 0, 1) == tokens[:1]
    assert tokens_between("one ", "en", tokens, 1, None) == tokens[1:]
    assert tokens_between("one ", "en", tokens, 2, None) == ()


def test_characters_of_a_language_without_spaces_get_the_token_that_ends_in_them() -> None:
    tokens = (token("你好"), token("世"), token("界"))
    assert tokens_between("你好世界", "zh", tokens, 0, 1) == ()
    assert tokens_between("你好世界", "zh", tokens, 1, 3) == tokens[:2]
    assert tokens_between("你好世界", "zh", tokens, 3, None) == tokens[2:]
    assert tokens_between("你 好世界", "zh", (token("你"), *map(token, " 好")), 0, 1) == ()


@pytest.mark.parametrize(
    ("before", "reading", "language", "sent"),
    [
        ("one two", "one two three four five six", "en", "one two three"),
        ("one two too", "one two three four five six", "en", "one two three"),
        ("one", "one two three", "en", "one"),
        ("thank you for watching this", "thank the cook for the good food", "en", "thank"),
        ("you", "the weather in Leiden is fine", "en", ""),
        ("", "the weather in Leiden is fine", "en", ""),
        ("你好", "你好吗我很好谢谢你", "zh", "你好吗"),
    ],
)
def test_one_reading_settles_words_that_three_more_follow_where_it_bears_out_the_last_one(
    before: str, reading: str, language: str, sent: str
) -> None:
    agreement, _ = agree(Agreement(), before, language)
    assert agree(agreement, reading, language)[1] == sent
