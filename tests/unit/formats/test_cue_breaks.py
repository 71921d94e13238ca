"""Cues that people can read: the rules of subtitlers, on words of any kind."""

from itertools import pairwise
from random import Random

import pytest

from asr_server.core import Word
from asr_server.formats.cue_breaks import (
    MAX_DURATION_S,
    MAX_LINE_WIDTH,
    MIN_DURATION_S,
    PAUSE_S,
    break_cost,
    line_width,
    readable_cues,
)


def spoken(text: str, seconds_per_letter: float = 0.06, start_s: float = 0.0) -> list[Word]:
    """Make words of a text, spoken evenly and without a pause."""
    words, at_s = [], start_s
    for word in text.split():
        end_s = at_s + seconds_per_letter * (len(word) + 1)
        words.append(Word(" " + word, at_s, end_s))
        at_s = end_s
    return words


def lines_of(words: list[Word]) -> list[list[str]]:
    return [["".join(w.text for w in line).strip() for line in cue.lines] for cue in readable_cues(words)]


def random_words(seed: int) -> list[Word]:
    random, at_s, words = Random(seed), 0.0, []
    for _ in range(random.randint(1, 300)):
        at_s += random.choice([0.0] * 12 + [0.05, 0.3, 0.99, 1.5])
        end_s = at_s + random.uniform(0.02, 0.9)
        text = "x" * random.randint(1, 14) + random.choice(["", "", "", "", ",", "."])
        words.append(Word(" " + random.choice([text, text, "and", "the"]), at_s, end_s))
        at_s = end_s
    return words


@pytest.mark.parametrize("label_width", [0, 20])
@pytest.mark.parametrize("seed", range(10))
def test_all_words_are_shown_in_order_within_the_limits(seed: int, label_width: int) -> None:
    words = random_words(seed)
    cues = list(readable_cues(words, label_width))
    assert [word for cue in cues for line in cue.lines for word in line] == words
    for cue in cues:
        assert len(cue.lines) <= 2
        assert all(line_width(line) <= MAX_LINE_WIDTH for line in cue.lines)
        assert line_width(cue.lines[0]) <= MAX_LINE_WIDTH - label_width
        assert MIN_DURATION_S - 1e-9 <= cue.end_s - cue.start_s <= MAX_DURATION_S + 1e-9
        inside = [word for line in cue.lines for word in line]
        gaps = [b.start_s - a.end_s for a, b in pairwise(inside)]
        assert all(gap < PAUSE_S for gap in gaps)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(cues))


def test_a_cue_ends_with_its_sentence() -> None:
    assert lines_of(spoken("The train leaves at nine. We should be there by eight.")) == [
        ["The train leaves at nine."],
        ["We should be there by eight."],
    ]


def test_short_sentences_share_a_cue() -> None:
    assert lines_of(spoken("No. Yes. I know.")) == [["No. Yes. I know."]]


def test_a_long_sentence_is_cut_at_its_clauses() -> None:
    text = (
        "When the last passenger had left the station in the evening, the old clock above the entrance "
        "stopped, and nobody noticed it until the following morning."
    )
    cues = lines_of(spoken(text))
    assert [cue[-1][-1] for cue in cues] == [",", ",", "."] or [cue[-1][-1] for cue in cues] == [",", "."]


def test_a_line_breaks_before_a_small_word_and_never_behind_one() -> None:
    [cue] = lines_of(spoken("She put all of her old letters into the small box under the window"))
    assert cue == ["She put all of her old letters", "into the small box under the window"]


@pytest.mark.parametrize(
    ("left", "right", "cost"),
    [
        (" end.", " And", 0.0),
        (' "end?"', " the", 0.0),
        (" 吗？」", "我", 0.0),
        (" however,", " the", 1.0),
        (" (both;)", " one", 1.0),
        (" The", " and", 6.0),
        (" house", " and", 2.0),
        (" house", " Und", 2.0),
        (" house", " door", 4.0),
    ],
)
def test_a_break_is_cheap_at_a_sentence_dear_behind_a_small_word(left: str, right: str, cost: float) -> None:
    assert break_cost(Word(left, 0, 1), Word(right, 1, 2)) == cost


def test_a_cue_is_shown_from_a_second_to_seven_and_not_into_the_next() -> None:
    def shown(*words: Word) -> list[tuple[float, float]]:
        return [(cue.start_s, cue.end_s) for cue in readable_cues(words)]

    assert shown(Word(" long.", 2.0, 12.0)) == [(2.0, 9.0)]
    assert shown(Word(" Yes.", 2.0, 2.5), Word(" No.", 3.75, 5.0)) == [(2.0, 3.0), (3.75, 5.0)]
    assert shown(Word(f" {'x' * 40}.", 2.0, 2.5), Word(" No.", 3.75, 5.0)) == [(2.0, 3.75), (3.75, 5.0)]
    assert shown(Word(f" {'x' * 40}.", 2.0, 2.5), Word(" No.", 9.0, 10.0))[0] == (2.0, 4.05)


@pytest.mark.parametrize(
    ("pause_s", "cues"),
    [
        (1.001, [["one two"], ["three four"]]),
        (1.0, [["one two"], ["three four"]]),
        (0.9, [["one two three four"]]),
    ],
)
def test_a_pause_of_a_second_ends_a_cue(pause_s: float, cues: list[list[str]]) -> None:
    words = spoken("one two", seconds_per_letter=0.125)
    assert lines_of(words + spoken("three four", start_s=words[-1].end_s + pause_s)) == cues


def test_two_lines_of_42_letters_and_seven_seconds_are_one_cue() -> None:
    line = f"{'x' * 20} {'y' * 21}"
    assert lines_of(spoken(f"{line} {line}", 0.05)) == [[line, line]]
    assert len(lines_of(spoken(f"{line} {line}z", 0.05))) == 2
    for end_s, num_cues in ((7.0, 1), (7.0625, 2)):
        assert len(lines_of([Word(" one", 0.0, 3.5), Word(" two", 3.5, end_s)])) == num_cues


def test_a_line_of_chinese_has_sixteen_letters() -> None:
    text = "今天我们讨论一个非常重要的问题它关系到每个人的生活和工作也关系到未来"
    words = [Word(letter, i * 0.2, (i + 1) * 0.2) for i, letter in enumerate(text)]
    shown = lines_of(words)
    assert "".join(line for cue in shown for line in cue) == text
    assert all(len(line) <= 16 for cue in shown for line in cue)


def test_marks_above_letters_have_no_width_and_wide_letters_two_and_a_half() -> None:
    assert line_width([Word(" a\u0301", 0, 1)]) == 1
    assert line_width([Word(" 今Ａ", 0, 1), Word(" é", 1, 2)]) == 2 * 42 / 16 + 2


def test_a_word_wider_than_a_line_has_a_line_to_itself() -> None:
    address = "https://" + "x" * 60
    assert address in [line for cue in lines_of(spoken(f"look at {address} now")) for line in cue]


def test_no_words_are_no_cues() -> None:
    assert list(readable_cues([])) == []
