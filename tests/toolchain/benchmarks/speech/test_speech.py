import pytest

from harness.speech.error_rates import TimedWord, time_errors_s, word_errors


@pytest.mark.parametrize(
    ("language", "said", "heard", "counted"),
    [
        ("en", "the cat sat on the mat", "the dog sat sat on mat", (6, 1, 1, 1)),
        ("en", "one two three", "1 2 4", (3, 1, 0, 0)),
        ("zh", "你好世界", "你好时界", (4, 1, 0, 0)),  # by characters: words are not written apart
        ("hi", "दिन", "दीन", (1, 1, 0, 0)),  # vowel signs are part of a word
    ],
)
def test_words_and_the_three_kinds_of_errors_are_counted(
    language: str, said: str, heard: str, counted: tuple[int, ...]
) -> None:
    found = word_errors(said, heard, language)
    assert (found.num_words, found.substitutions, found.insertions, found.deletions) == counted
    assert found.error_rate == pytest.approx(sum(counted[1:]) / counted[0])


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


def test_times_are_compared_of_the_words_that_were_heard_right() -> None:
    truth = [TimedWord("One,", 0.0, 0.5), TimedWord("two", 1.0, 1.5), TimedWord("three", 2.0, 2.5)]
    heard = [TimedWord(" one", 0.1, 0.5), TimedWord("too", 1.0, 1.5), TimedWord("um", 1.6, 1.7)]
    heard.append(TimedWord("three.", 2.0, 2.8))
    assert time_errors_s(truth, heard) == pytest.approx([0.1, 0.3])
