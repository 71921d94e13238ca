"""Times of words that have others before and behind them."""

from __future__ import annotations

import msgspec
import pytest

from asr_server.transcription.word_times import AlignedWord, aligned_word, edges_by_letters, leave_out_pauses
from tests.fake_replica import say

Times = tuple[float, float]


def word(start_s: float, end_s: float, peak_s: float, text: str = " word") -> AlignedWord:
    return AlignedWord(text, start_s, end_s, peak_s, peak_s)


def timed(words: list[AlignedWord], *pauses_s: Times) -> list[Times]:
    found = leave_out_pauses(words, pauses_s, words[-1].end_s)
    assert [each.text for each in found] == [each.text for each in words]
    return [(round(each.start_s, 6), round(each.end_s, 6)) for each in found]


def test_a_word_has_the_times_of_its_first_and_last_tokens() -> None:
    result = msgspec.structs.replace(
        say(1, 2, 3, 4), token_times_s=(0.0, 0.5, 1.0, 1.5, 2.0), token_peaks_s=(0.1, 0.6, 1.1, 1.6)
    )
    assert aligned_word(" one", result, 1, 4) == (" one", 0.5, 2.0, 0.6, 1.6)
    assert aligned_word(" one", result, 2, 3) == (" one", 1.0, 1.5, 1.1, 1.1)


def test_a_click_behind_a_long_pause_leaves_the_pauses_before_it() -> None:
    words = [word(0, 0.6, 0.2), word(0.6, 2.6, 1.2), word(2.6, 5.0, 4.9)]
    assert timed(words, (0.5, 0.7), (1.3, 2.5), (2.53125, 4.5)) == [(0, 0.5), (0.7, 1.3), (4.5, 5.0)]


def test_words_in_a_pause_behind_a_clause_share_the_next_words_time() -> None:
    said = [word(0, 0.5, 0.25), word(0.5, 0.75, 0.6, " end."), word(0.75, 1.0, 0.9), word(1.0, 1.25, 1.1)]
    behind = [word(1.25, 2.1, 1.75), word(2.1, 2.5, 2.25)]
    found = timed([*said, *behind], (0.5, 1.5))
    assert found[2:] == [(1.5, 1.7), (1.7, 1.9), (1.9, 2.1), (2.1, 2.5)]
    assert found[1][1] <= 1.5


@pytest.mark.parametrize(
    ("before", "behind", "is_moved"),
    [
        ([" a."], " b", True),
        ([" a"], " b.", False),
        ([" a.", " b"], " c", False),
        ([" a", " b."], " c", True),
    ],
)
def test_only_a_clauses_first_word_leaves_other_speech_to_the_next(
    before: list[str], behind: str, is_moved: bool
) -> None:
    """It lies on three seconds of speech, and then on a pause."""
    first = [word(0.2 * n, 0.2 * (n + 1), 0.2 * n + 0.1, text) for n, text in enumerate(before)]
    found = timed(
        [*first, word(0.5, 4.2, 0.75), word(4.2, 5.0, 4.7, behind), word(5.0, 5.5, 5.25)], (3.5, 4.5)
    )
    assert (found[len(before)][0] >= 4.5) == is_moved
    assert found[-1] == (5.0, 5.5)


def test_a_word_is_the_sound_whose_edge_is_nearest_to_what_it_attends_to() -> None:
    pauses_s = (1.0, 1.5625), (3.0, 4.0)
    assert timed([word(0, 7.0, 1.4)], *pauses_s) == [(1.5625, 3.0)]
    assert timed([word(0, 7.0, 1.2)], *pauses_s) == [(0, 1.0)]


def test_two_hurried_words_behind_another_keep_their_times() -> None:
    words = [word(0, 0.5, 0.25), word(0.5, 0.52, 0.51), word(0.52, 0.54, 0.53), word(0.54, 1.0, 0.75)]
    assert timed(words) == [(0, 0.5), (0.5, 0.52), (0.52, 0.54), (0.54, 1.0)]


def test_one_letter_alone_has_all_the_time() -> None:
    assert edges_by_letters([" a"], 1.0, 2.0) == [(1.0, 2.0)]
    assert edges_by_letters([" "], 1.0, 2.0) == [(1.0, 2.0)]
