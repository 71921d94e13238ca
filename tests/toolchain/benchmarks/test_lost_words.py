"""What counts as lost under a condition, and what the conditions do to a recording."""

import numpy as np
import pytest

from asr_server.audio.native import FLAC_LAYOUTS
from asr_server.audio.stream import Mono16k
from asr_server.core import SAMPLE_RATE
from benchmarks.batch_reader import Reading
from benchmarks.lost_words import change, num_rightly_read
from harness.speech.conditions import CONDITIONS, GIVEN, LEVEL_DB, Sound
from harness.speech.corpora import known_clips
from harness.speech.synthesis import SaidSentence, Speech
from tests.support.speech import say

TRUTH = "the train was late again and nobody had told us why"
SPOKEN = say("31415926", "rms", gap_s=0.3).samples
SPEECH = Speech(SPOKEN, (SaidSentence("three one four one", 0.0, 1.0), SaidSentence("five nine", 2.0, 3.0)))


def under(condition: str, seed: int = 1) -> Sound:
    return CONDITIONS[condition](SPEECH, np.random.default_rng(seed))


def test_a_word_is_lost_if_only_the_plain_transcript_has_it() -> None:
    plain = "The tram was late again, and nobody had told us why."
    under_noise = Reading("The tram was late, and somebody had to, told us why.", [], ("dropped",))
    found = change(TRUTH, plain, under_noise)
    assert (found.num_right, found.lost, found.num_lost) == (10, ("again", "nobody"), 2)
    assert (found.num_invented, found.dropped) == (1, ("dropped",))


def test_a_word_that_only_the_condition_shows_is_no_loss() -> None:
    assert change(TRUTH, "The tram was late", Reading("The train was late", [])).lost == ()


def test_dropped_text_is_right_if_it_is_said_and_nowhere_in_the_answer() -> None:
    dropped = ("nobody had told us why", "Thank you.", "the train was late")
    assert num_rightly_read(TRUTH, Reading("The train was late again", [], dropped)) == 5


@pytest.mark.parametrize("condition", sorted(set(CONDITIONS) - GIVEN - {"languages"}))
def test_a_condition_is_the_same_for_a_seed_and_keeps_the_length(condition: str) -> None:
    sound = under(condition)
    assert np.array_equal(sound, under(condition))
    assert len(sound) == len(SPOKEN) + (round(0.37 * SAMPLE_RATE) if condition == "later" else 0)
    assert sound.dtype == np.float32


@pytest.mark.skipif(not known_clips(["audioeval"], 1), reason="not here: harness/speech/install.sh")
def test_another_language_stands_behind_every_second_sentence() -> None:
    sound, end = under("languages"), round(3.0 * SAMPLE_RATE)
    assert np.array_equal(sound[:end], SPOKEN[:end])
    assert not sound[end : end + round(0.8 * SAMPLE_RATE)].any()
    assert np.array_equal(sound[len(sound) - len(SPOKEN) + end :], SPOKEN[end:])
    assert len(sound) > len(SPOKEN) + 2 * SAMPLE_RATE


def test_speech_is_the_centre_of_a_film_and_cancels_out_in_inverted_sides() -> None:
    centre = under("surround")[:, FLAC_LAYOUTS[6].index("FC")]
    assert np.corrcoef(centre, SPOKEN)[0, 1] == pytest.approx(1.0)
    sides = under("inverted")
    assert np.abs(sides.sum(axis=1)).max() < 0.01
    mono = Mono16k(SAMPLE_RATE, 2).push(sides)
    assert np.corrcoef(mono, SPOKEN)[0, 1] == pytest.approx(1.0, abs=0.01)


def test_whispering_keeps_the_level_and_has_no_pitch() -> None:
    sound = under("whispered")
    voiced = sound[np.abs(sound) > 1e-4]
    assert 10 * np.log10(np.mean(voiced**2)) == pytest.approx(LEVEL_DB, abs=0.5)
    assert _strongest_period(sound) < 0.5 * _strongest_period(SPOKEN)


def _strongest_period(samples: Sound) -> float:
    """Return the median over loud frames of the autocorrelation's peak between 80 and 400 Hz."""
    frames = samples[: len(samples) // 640 * 640].reshape(-1, 640)
    loud = frames[np.argsort((frames**2).sum(axis=1))[-20:]]
    powers = [np.correlate(frame, frame, "full")[639:] for frame in loud]
    return float(np.median([each[40:200].max() / each[0] for each in powers]))
