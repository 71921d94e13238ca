"""Words of a text against words that were heard: what matches, in which order, and what does by chance."""

import difflib
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_server.annexes.alignment.matching import letters_in, matched, words_in

VOCABULARY = ["".join("abcdefghij"[int(digit)] for digit in str(100 + n)) for n in range(3000)]
SHARES = [(3 + number) ** -1.2 for number in range(3000)]  # as in a language, a few words make up a third


def a_book(num_words: int, seed: int = 0) -> list[str]:
    return random.Random(seed).choices(VOCABULARY, SHARES, k=num_words)


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.lists(st.sampled_from("abcd"), max_size=60))
def test_pairs_are_equal_words_in_order(a: list[str], b: list[str]) -> None:
    pairs = matched(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < n for (i, j), (k, n) in pairwise(pairs))


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=400))
def test_a_text_matches_itself_whole(words: list[str]) -> None:
    assert matched(words, words) == [(i, i) for i in range(len(words))]


def test_hours_match_where_words_differ() -> None:
    heard, draw = a_book(60_000), random.Random(1)
    text = [word if draw.random() > 0.05 else f"x{n}" for n, word in enumerate(heard)]
    same = sum(a == b for a, b in zip(text, heard, strict=True))
    assert len(matched(text, heard)) >= 0.98 * same


@pytest.mark.parametrize("missing", [slice(0, 500), slice(800, 1700), slice(2500, 3000)])
def test_a_missing_chapter_leaves_all_else_in_place(missing: slice) -> None:
    heard = a_book(3000)
    text = [*heard]
    del text[missing]
    assert len(matched(text, heard)) >= 0.99 * len(text)
    assert len(matched(heard, text)) >= 0.99 * len(text)


@pytest.mark.parametrize("step", [1, -1])
def test_a_word_beside_a_missing_chapter_stays_with_its_sentence(step: int) -> None:
    """Where the recording begins, or ends, with the same word."""
    chapter, rest = ["the", "museum", *a_book(1000)], ["the", "river", *a_book(300, seed=1)]
    heard, text = [*chapter, *rest][::step], rest[::step]
    text[150] = "other"
    offset = len(chapter) if step == 1 else 0
    assert matched(text, heard) == [(i, i + offset) for i in range(len(text)) if i != 150]


def test_a_repeated_paragraph_matches_once() -> None:
    heard = a_book(2000)
    text = [*heard[:1200], *heard[900:1200], *heard[1200:]]
    found = dict(matched(text, heard))
    assert len(found) == len(heard)
    assert {*range(len(text))} - {*found} <= {*range(900, 1500)}


def test_other_text_with_the_same_frequent_words_matches_nowhere() -> None:
    text, heard = a_book(180, seed=1), a_book(180, seed=2)
    by_difflib = difflib.SequenceMatcher(None, text, heard, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in by_difflib) > 5, "or the test proves nothing"
    assert matched(text, heard) == []
    assert matched(a_book(5000, seed=1), a_book(5000, seed=2)) == []


@pytest.mark.parametrize(
    ("text", "is_spaced", "words"),
    [
        ("Hello — dear “friends” ... here", True, ["Hello —", "dear", "“friends” ...", "here"]),
        ("— Yes.", True, ["— Yes."]),
        ("你好，世界。", False, ["你", "好，", "世", "界。"]),
        ("... !", True, []),
        ("", True, []),
    ],
)
def test_words_keep_the_marks_beside_them(text: str, is_spaced: bool, words: list[str]) -> None:
    assert words_in(text, is_spaced) == words


@pytest.mark.parametrize(
    ("word", "letters"),
    [("It’s", ["its"]), ("IT'S,", ["its"]), ("well-known", ["well", "known"]), ("ﬁn", ["fin"]), ("…", [])],
)
def test_words_are_compared_by_their_letters(word: str, letters: list[str]) -> None:
    assert letters_in(word) == letters
