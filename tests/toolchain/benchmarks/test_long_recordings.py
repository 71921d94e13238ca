"""What the comparison of long recordings counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asr_server.core import Word
from benchmarks.batch_reader import Read
from benchmarks.long_recordings import Found, compare
from harness.speech.synthesis import SaidSentence, Speech

SAID = Speech(
    np.zeros(16_000, np.float32),
    (SaidSentence("The train was late again.", 1.0, 3.0), SaidSentence("Nobody had told us why.", 8.0, 10.0)),
)


def segment(text: str, start_s: float) -> Read:
    words = tuple(
        Word(f" {word}", start_s + 0.4 * n, start_s + 0.4 * n + 0.3) for n, word in enumerate(text.split())
    )
    return Read(f" {text}", start_s, words)


FIRST, SECOND = segment("The train was late again.", 1.1), segment("Nobody had told us why.", 8.2)


def test_a_right_transcript_has_nothing_wrong() -> None:
    assert compare(SAID, [FIRST, SECOND], is_mixed=False) == Found(10, 0, [], [], [], [], [], [])


def test_lost_and_repeated_sentences_and_wrong_times_are_named() -> None:
    assert compare(SAID, [FIRST], is_mixed=False).lost == ["nobody had told us why"]
    twice = compare(SAID, [FIRST, FIRST, SECOND], is_mixed=False)
    assert twice.said_twice == twice.invented == ["the train was late again"]
    early = compare(SAID, [FIRST, segment("Nobody had told us why.", 4.0)], is_mixed=False)
    assert early.words_off[0] == early.starts_off[0] == "nobody at 4.00, its sentence at 8.00"


def test_words_are_compared_with_the_times_of_the_voice() -> None:
    words_s = tuple((1.1 + 0.4 * n, 1.4 + 0.4 * n) for n in range(5))
    timed = Speech(SAID.samples, (replace(SAID.sentences[0], words_s=words_s), SAID.sentences[1]))
    assert compare(timed, [FIRST, SECOND], is_mixed=False).near_share(0.2) == 1.0
    late = compare(timed, [segment("The train was late again.", 1.4), SECOND], is_mixed=False)
    assert late.errors_s == pytest.approx([0.3] * 5)
    assert late.near_share(0.2) == 0.0


def test_text_of_another_language_is_neither_wrong_nor_the_start_of_a_sentence() -> None:
    foreign = segment("Nobody came from that village.", 4.0)
    found = compare(SAID, [FIRST, foreign, SECOND], is_mixed=True)
    assert (found.errors, found.invented, found.starts_off) == (0, [], [])


def test_a_word_is_compared_in_its_sentence_and_not_where_other_speech_repeats_it_before_the_next() -> None:
    foreign = segment("Us why.", 6.0)
    speech = replace(
        SAID, sentences=(SAID.sentences[1], replace(SAID.sentences[0], start_s=14.0, end_s=16.0))
    )
    transcript = [SECOND, segment("Told us why.", 11.5), segment("The train was late again.", 14.1)]
    assert compare(speech, transcript, is_mixed=True).words_off == []
    early = [segment("Nobody had told us why.", 4.0), foreign, segment("The train was late again.", 14.1)]
    assert len(compare(speech, early, is_mixed=True).words_off) == 5, "said nowhere else"
