from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from benchmarks import accuracy
from benchmarks.accuracy import answers_of, read_manifest, score
from benchmarks.transcribers import SYSTEMS, Heard, Task
from harness.speech.corpora import Clip
from harness.speech.error_rates import TimedWord


def clip(name: str, text: str, language: str = "en", corpus: str = "some") -> Clip:
    return Clip(name, corpus, Path(name), text, language, "")


def test_a_manifest_names_files_beside_it_and_wants_a_time_for_each_word(tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"audio": "a.wav", "text": "one two"}) + "\n")
    (entry,), times = read_manifest(manifest)
    assert (entry.path, entry.language, times) == (tmp_path / "a.wav", "en", {})
    manifest.write_text(json.dumps({"audio": "a.wav", "text": "one two", "times": [[0, 1]]}))
    with pytest.raises(SystemExit, match="as many times as words"):
        read_manifest(manifest)


def test_words_times_are_scored_where_they_are_known() -> None:
    heard = Heard("One three", [TimedWord(" One", 0.1, 0.5), TimedWord(" three", 1.0, 1.5)])
    found = score(clip("a", "one two"), heard, {"a": [(0.0, 0.5), (1.0, 1.5)]})
    assert (found.num_words, found.substitutions, found.time_errors_s) == (2, 1, [0.1])


def test_what_a_system_has_answered_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    @contextmanager
    def parrot(task: Task) -> Any:
        def transcribe(clips: Any, report: Any) -> None:
            for each in clips:
                asked.append(each.name)
                report(each, Heard(each.text, []))

        yield transcribe

    monkeypatch.setattr(accuracy, "CACHE", tmp_path)
    monkeypatch.setitem(SYSTEMS, "parrot", parrot)
    (tmp_path / "model.safetensors").write_bytes(b"")
    task, (first, second) = Task(tmp_path), (clip("a", "one"), clip("b", "two"))
    with Progress(disable=True) as progress:
        answers_of("parrot", task, [first], False, progress)
        found = answers_of("parrot", task, [first, second], False, progress)
        assert asked == ["a", "b"]
        assert {name: heard.text for name, heard in found.items()} == {"a": "one", "b": "two"}
        answers_of("parrot", task, [first], True, progress)
    assert asked == ["a", "b", "a"]
