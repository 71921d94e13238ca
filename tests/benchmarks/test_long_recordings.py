"""What the comparison of long recordings counts."""

from __future__ import annotations

import numpy as np

from asr_server.core import Segment, Transcript, Word
from benchmarks.long_recordings import compare
from benchmarks.speech.synthesis import SaidSentence, Speech

SAID = Speech(
    np.zeros(16_000, np.float32),
    (SaidSentence("The train was late again.", 1.0, 3.0), SaidSentence("Nobody had told us why.", 8.0, 10.0)),
)


def segment(text: str, start_s: float) -> Segment:
    words = tuple(
        Word(f" {word}", start_s + 0.4 * n, start_s + 0.4 * n + 0.3) for n, word in enumerate(text.split())
    )
    return Segment(0, 0, start_s, start_s + 2, f" {text}", (), 0.0, -0.1, 1.0, 0.0, words)


def transcript(*segments: Segment) -> Transcript:
    text = " ".join(each.text.strip() for each in segments)
    return Transcript(text, segments, (), "english", 10.0, 0, 0)


FIRST, SECOND = segment("The train was late again.", 1.1), segment("Nobody had told us why.", 8.2)


def test_a_right_transcript_has_nothing_wrong() -> None:
    assert compare(SAID, transcript(FIRST, SECOND), is_mixed=False) == (10, 0, [], [], [], [])


def test_lost_and_repeated_sentences_and_wrong_times_are_named() -> None:
    assert compare(SAID, transcript(FIRST), is_mixed=False).lost == ["nobody had told us why"]
    twice = compare(SAID, transcript(FIRST, FIRST, SECOND), is_mixed=False)
    assert twice.said_twice == twice.invented == ["the train was late again"]
    early = compare(SAID, transcript(FIRST, segment("Nobody had told us why.", 4.0)), is_mixed=False)
    assert early.late_or_early[0] == "nobody at 4.00, its sentence at 8.00"
