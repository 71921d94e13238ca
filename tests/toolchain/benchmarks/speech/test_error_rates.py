from __future__ import annotations

import pytest

from harness.speech.error_rates import TimedWord, normalise, time_errors_s, word_errors


def test_the_three_kinds_of_errors_are_told_apart() -> None:
    found = word_errors("the cat sat on the mat", "the dog sat sat on mat")
    assert (found.num_words, found.substitutions, found.insertions, found.deletions) == (6, 1, 1, 1)
    assert found.error_rate == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("language", "said", "heard"),
    [
        ("en", "Mr. Brown can't colour it, twenty-one times!", "mister brown can not color it 21 times"),
        ("en", "One two three four.", "1, 2, 3, 4"),
        ("en", "One two three four.", "1-2-3-4"),
        ("en", "It’s well-known.", "It's well known"),
        ("nl", "Dat is één van de tien, 's avonds.", "dat is een van de 10 ’s avonds"),
        ("es", "Uno dos tres.", "1, 2, 3."),
        ("pl", "Jeden dwa trzy.", "1 2 3"),
        ("fr", "L'été, sept fois.", "l’été 7 fois"),
        ("zh", "一二三，你好。", "1 2 3 你好"),
        ("ja", "一二三四", "1、2、3、4"),
        ("ja", "一二三四五六", "123456"),
        ("hi", "एक दो तीन पांच", "1, 2, 3, पाँच।"),
    ],
)
def test_spelling_figures_and_punctuation_are_no_errors(language: str, said: str, heard: str) -> None:
    assert word_errors(said, heard, language).errors == 0


def test_characters_count_where_words_are_not_written_apart() -> None:
    found = word_errors("你好世界", "你好时界", "zh")
    assert (found.num_words, found.substitutions) == (4, 1)


def test_vowel_signs_of_hindi_are_part_of_its_words() -> None:
    assert normalise("नमस्ते दुनिया.", "hi") == ["नमस्ते", "दुनिया"]
    assert word_errors("दिन", "दीन", "hi").errors == 1


def test_each_word_of_a_number_counts() -> None:
    assert word_errors("one two three", "1 2 4").substitutions == 1
    assert word_errors("one two three", "1 2 4").num_words == 3


def test_times_are_compared_of_the_words_that_were_heard_right() -> None:
    truth = [TimedWord("One,", 0.0, 0.5), TimedWord("two", 1.0, 1.5), TimedWord("three", 2.0, 2.5)]
    heard = [TimedWord(" one", 0.1, 0.5), TimedWord("too", 1.0, 1.5), TimedWord("um", 1.6, 1.7)]
    heard.append(TimedWord("three.", 2.0, 2.8))
    assert time_errors_s(truth, heard) == pytest.approx([0.1, 0.3])
