from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.accuracy import read_manifest
from benchmarks.scoring import NORMALISERS, Score, TimedWord, time_errors_s, word_errors

ENGLISH = NORMALISERS["english"]


def test_the_three_kinds_of_errors_are_told_apart() -> None:
    found = word_errors("the cat sat on the mat", "the dog sat sat on mat", ENGLISH)
    assert (found.num_words, found.substitutions, found.insertions, found.deletions) == (6, 1, 1, 1)
    assert found.error_rate == pytest.approx(0.5)


def test_spelling_and_punctuation_are_no_errors() -> None:
    said, heard = "Mr. Brown can't colour it, twenty-one times!", "mister brown can not color it 21 times"
    assert word_errors(said, heard, ENGLISH).error_rate == 0


def test_a_word_too_many_where_nothing_was_said_counts() -> None:
    assert word_errors("", "thank you", ENGLISH).insertions == 2


def test_times_are_compared_of_the_words_that_were_heard_right() -> None:
    truth = [TimedWord("One,", 0.0, 0.5), TimedWord("two", 1.0, 1.5), TimedWord("three", 2.0, 2.5)]
    heard = [TimedWord(" one", 0.1, 0.5), TimedWord("too", 1.0, 1.5), TimedWord("um", 1.6, 1.7)]
    heard.append(TimedWord("three.", 2.0, 2.8))
    assert time_errors_s(truth, heard) == pytest.approx([0.1, 0.3])


def test_scores_add_up() -> None:
    both = Score(3, 1, 0, 1, [0.1]) + Score(5, 0, 2, 0, [0.2])
    assert (both.num_words, both.error_rate, both.time_errors_s) == (8, 0.5, [0.1, 0.2])


def test_a_manifest_names_files_beside_it_and_wants_a_time_for_each_word(tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"audio": "a.wav", "text": "one two"}) + "\n")
    assert [(each.audio, each.language, each.times) for each in read_manifest(manifest)] == [
        (tmp_path / "a.wav", "en", ())
    ]
    manifest.write_text(json.dumps({"audio": "a.wav", "text": "one two", "times": [[0, 1]]}))
    with pytest.raises(SystemExit, match="as many times as words"):
        read_manifest(manifest)
