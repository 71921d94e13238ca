"""The figures of a live session's record, by the definitions that `benchmarks/live_record.py` names."""

from typing import Any

import numpy as np
import pytest

from benchmarks.live_record import Entry, Figures, figures_of
from harness.speech.synthesis import SaidSentence, Speech

WORDS_S = ((1.0, 1.4), (1.5, 2.0), (2.0, 3.0))
SPEECH = Speech(np.zeros(10 * 16_000, np.float32), (SaidSentence("Go home now.", 1.0, 3.0, WORDS_S),))


def said(at_s: float, name: str, **fields: Any) -> Entry:
    group = (
        "input_audio_buffer" if name.startswith("speech") else "conversation.item.input_audio_transcription"
    )
    return Entry(at_s, at_s, {"type": f"{group}.{name}", "item_id": fields.pop("item", "a"), **fields})


RECORD = [
    said(1.1, "speech_started", audio_start_ms=900),
    said(2.0, "interim", tail="Go hope", audio_end_ms=1900),
    said(2.6, "delta", delta="Go"),
    said(2.6, "interim", tail="home", audio_end_ms=2400),
    said(3.5, "speech_stopped", audio_end_ms=3500),
    said(4.0, "delta", delta=" home now."),
    said(4.0, "interim", tail="", audio_end_ms=3250),
    said(4.0, "completed", transcript="Go home now."),
]


def test_a_word_is_late_from_its_end_to_the_first_event_that_shows_it() -> None:
    figures = figures_of(SPEECH, RECORD, "")
    assert figures.interim_s == pytest.approx([2.0 - 1.4, 2.6 - 2.0, 4.0 - 3.0])
    assert figures.confirmed_s == pytest.approx([2.6 - 1.4, 4.0 - 2.0, 4.0 - 3.0])
    assert figures.to_final_s == pytest.approx([4.0 - 3.0])


def test_erasure_counts_the_words_taken_back_for_each_of_the_final_text() -> None:
    assert figures_of(SPEECH, RECORD, "").erasure == pytest.approx(1 / 3)


def test_yaal_is_the_mean_lag_behind_an_even_pace() -> None:
    figures = figures_of(SPEECH, RECORD, "")
    pace_s = 2.0 / 3  # of three words in two seconds
    ideal_s = [1.0 + number * pace_s for number in range(3)]
    assert figures.yaal_aware_s == pytest.approx([np.mean(np.subtract([2.6, 4.0, 4.0], ideal_s))])
    assert figures.yaal_unaware_s == pytest.approx([np.mean(np.subtract([2.4, 3.5, 3.5], ideal_s))])


def test_a_turn_too_many_is_a_false_end_and_sessions_add_up() -> None:
    again = [
        said(3.0, "speech_started", item="b", audio_start_ms=2500),
        said(5.0, "completed", item="b", transcript="Oh."),
    ]
    figures = figures_of(SPEECH, [*RECORD, *again], "Go home.")
    assert (figures.num_false_ends, figures.num_missed) == (1, 0)
    assert figures.to_final_s == pytest.approx([2.0])
    assert (figures.final.insertions, figures.live.errors, figures.file.deletions) == (1, 0, 1)
    both = figures + figures_of(SPEECH, [], "")
    assert (both.num_sentences, both.num_missed, len(both.confirmed_s)) == (2, 1, 3)
    assert both.live.num_words == 6
    assert figures + Figures() == figures
