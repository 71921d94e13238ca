import numpy as np
import pytest
from scipy.signal import fftconvolve

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.error_rates import TimedWord, time_errors_s, word_errors
from harness.speech.speech_times import speech_of


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


BURSTS_S = [(0.5, 1.5), (2.2, 3.0), (3.5, 5.0)]
DURATION_S = 8.0


def bursts() -> Samples:
    """Noise whose loudness goes up and down as that of syllables does."""
    rng = np.random.default_rng(0)
    at_s = np.arange(int(DURATION_S * SAMPLE_RATE)) / SAMPLE_RATE
    is_loud = np.any([(start <= at_s) & (at_s < end) for start, end in BURSTS_S], axis=0)
    syllables = 0.6 + 0.4 * np.sin(2 * np.pi * 4 * at_s)
    return np.asarray(0.1 * rng.standard_normal(len(at_s)) * syllables * is_loud, np.float32)


def in_a_hall(samples: Samples, falls_db_s: float, below_db: float) -> Samples:
    """With an echo that falls evenly, and has so much less energy than the sound itself."""
    rng = np.random.default_rng(1)
    at_s = np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE
    echo = rng.standard_normal(len(at_s)) * 10 ** (-falls_db_s * at_s / 20)
    echo *= 10 ** (-below_db / 20) / np.sqrt((echo**2).sum())
    echo[0] += 1
    return np.asarray(fftconvolve(samples, echo)[: len(samples)], np.float32)


def worst_s(found: list[tuple[float, float]]) -> float:
    assert len(found) == len(BURSTS_S)
    return float(np.abs(np.array(found) - np.array(BURSTS_S)).max())


def test_without_an_echo_speech_is_where_it_is_loud() -> None:
    assert worst_s(speech_of(bursts())) < 0.02


@pytest.mark.parametrize(("falls_db_s", "below_db"), [(33.0, 10.0), (33.0, 15.0), (60.0, 8.0)])
def test_an_echo_is_no_speech(falls_db_s: float, below_db: float) -> None:
    assert worst_s(speech_of(in_a_hall(bursts(), falls_db_s, below_db))) < 0.1


def test_short_pauses_are_speech_and_clicks_are_not() -> None:
    samples = bursts()
    samples[int(1.0 * SAMPLE_RATE) : int(1.2 * SAMPLE_RATE)] = 0
    samples[int(6.0 * SAMPLE_RATE) : int(6.05 * SAMPLE_RATE)] = 0.1
    assert worst_s(speech_of(samples)) < 0.02
