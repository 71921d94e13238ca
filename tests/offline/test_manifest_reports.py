"""How far a manifest's job is: a bar, a line a minute, and a file of what failed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from asr_server.offline.manifest import LineReport, Reports
from asr_server.offline.outputs import OutputError

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DONE = LineReport(0, "transcribed", "a", "a.wav", duration_s=1800.0)
FAILED = LineReport(30, "failed", "b", "b.wav", "damaged")


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "")


def test_each_line_is_counted_and_those_that_failed_are_written_down(tmp_path: Path) -> None:
    with Reports(tmp_path, 7, quiet=True) as reports:
        assert reports.numbers() == "nothing done, 0.0 h of audio, 7 lines not begun or not finished"
        reports.add(DONE)
        reports.add(LineReport(60, "skipped", "c", "c.wav"))
        reports.add(FAILED)
        line = {"offset": 30, "id": "b", "audio": "b.wav", "error": "damaged"}
        assert json.loads((tmp_path / "errors.jsonl").read_text()) == line, "it is there at once"
        reports.add(LineReport(90, "failed", error="no line"))
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 2
    assert reports.counts == {"transcribed": 1, "skipped": 1, "failed": 2}
    expected = "1 transcribed, 1 skipped, 2 failed, 0.5 h of audio"
    assert FAILED.duration_s == 0.0, "what failed has no audio"
    assert reports.numbers() == f"{expected}, 3 lines not begun or not finished"


@pytest.mark.parametrize("num_lines", [1, 0])
def test_nothing_is_left_once_all_lines_are_done(tmp_path: Path, num_lines: int) -> None:
    with Reports(tmp_path, num_lines, quiet=True) as reports:
        reports.add(LineReport(0, "transcribed", duration_s=1000.6 * 3600))
    assert reports.numbers() == "1 transcribed, 1000.6 h of audio"


def test_hours_are_of_what_was_transcribed(tmp_path: Path) -> None:
    with Reports(tmp_path, 1, quiet=True) as reports:
        reports.add(LineReport(0, "transcribed", duration_s=179.5))
    assert reports.numbers() == "1 transcribed, 0.0 h of audio"


def test_without_a_terminal_the_numbers_are_a_line_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lines = []
    with Reports(tmp_path, 9, quiet=False) as reports:
        for clock[0] in (159.9, 160.0, 219.9, 220.0):
            reports.add(DONE)
            lines.append(capsys.readouterr().err)
    left = "h of audio, {} lines not begun or not finished\n"
    assert lines == ["", f"2 transcribed, 1.0 {left.format(7)}", "", f"4 transcribed, 2.0 {left.format(5)}"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_quiet_job_shows_nothing(
    tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
    with Reports(tmp_path, 9, quiet=True) as reports:
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)
        reports.add(DONE)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_counts_lines_failures_and_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Reports(tmp_path, 4, quiet=False) as reports:
        reports.add(LineReport(0, "transcribed", duration_s=1000.6 * 3600))
        reports.add(FAILED)
    written = capsys.readouterr().err
    assert re.search(r"━ 0/4 lines +\d", CONTROL.sub("", written))
    assert re.search(r"━ 2/4 lines, 1 failed, 1000\.6 h of audio +\d", CONTROL.sub("", written))
    assert written.rindex("\x1b[2K") > written.rindex("lines"), "the bar is taken away at the end"


def test_a_file_of_failures_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "errors.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*errors\.jsonl: Is a directory"):
        Reports(tmp_path, 1, quiet=True)


def test_a_failure_that_cannot_be_written_down_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "errors.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(OutputError, match=r"cannot write .*errors\.jsonl: No space left on device"),
        Reports(tmp_path, 1, quiet=True) as reports,
    ):
        reports.add(FAILED)
