"""The numbers of a run, and its exit status."""

from __future__ import annotations

import re

import pytest

from asr_server.annexes.offline.inputs import Failure
from asr_server.annexes.offline.progress import ProgressBars, Summary

FAILED = [Failure("b.wav", "damaged")]


@pytest.mark.parametrize(
    ("summary", "numbers"),
    [
        (Summary(), "nothing to do"),
        (Summary(3, num_skipped=3), "3 skipped"),
        (Summary(1, 1, elapsed_s=2.0), "1 transcribed; 0.0 s of audio in 2.0 s (0.0 x)"),
        (
            Summary(9, 4, 2, audio_s=90.0, elapsed_s=10.0, failures=FAILED),
            "4 transcribed, 2 skipped, 1 failed, 2 not begun or not finished; "
            "90.0 s of audio in 10.0 s (9.0 x)",
        ),
    ],
)
def test_every_input_is_counted_once(summary: Summary, numbers: str) -> None:
    assert summary.numbers() == numbers


@pytest.mark.parametrize(
    ("summary", "quiet", "lines"),
    [
        (Summary(1, 1, audio_s=1.0, elapsed_s=1.0), False, []),
        (Summary(2, 2, 0, 2.0, 1.0), False, ["2 transcribed; 2.0 s of audio in 1.0 s (2.0 x)"]),
        (Summary(1, num_skipped=1), False, ["1 skipped"]),
        (Summary(2, 1, failures=FAILED), True, ["failed: b.wav: damaged"]),
        (Summary(1, failures=FAILED), False, ["failed: b.wav: damaged", "1 failed"]),
        (Summary(stop_reason="interrupted"), True, ["stopped: interrupted"]),
        (
            Summary(1, 1, cut_short=["a"], unheard=["a: no speech"]),
            True,
            [
                "warning: a: damaged or cut short; what could be read is transcribed",
                "warning: a: no speech",
            ],
        ),
    ],
)
def test_warnings_and_failures_are_always_shown_and_numbers_where_they_say_more(
    summary: Summary, quiet: bool, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    summary.show(quiet)
    assert capsys.readouterr().err.splitlines() == lines


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture(params=[True])
def is_terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rich takes standard error for a terminal, of 200 columns."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1" if request.param else "")
    return bool(request.param)


def plain(text: str) -> str:
    return CONTROL.sub("", text)


@pytest.mark.usefixtures("is_terminal")
def test_each_recording_has_a_bar_and_all_of_several_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars(2, quiet=False)
    with bars.shown():
        first = bars.begin("[red]a.wav\x07")
        bars.move(first, 100.4, 200.0)
        bars.finish(first)
        second = bars.begin("b.wav")
        bars.move(second, 10.0, None)
        bars.move(second, 20.0, 0.0)
        bars.move(second, 0.2, 0.8)
    shown = plain(capsys.readouterr().err)
    assert re.search(r"all +[━╸╺]+ +\d", shown)
    assert re.search(r"\[red\]a\.wav\\x07 +[━╸╺]+ +0:01:40 of 0:03:20 +\d", shown)
    assert re.search(r"all +[━╸╺]+ +1 of 2 files +\d", shown)
    assert re.search(r"b\.wav +[━╸╺]+ +0:00:10 +\d", shown)
    assert re.search(r"b\.wav +[━╸╺]+ +0:00:20 +\d", shown)
    assert re.search(r"b\.wav +[━╸╺]+ +0:00:00 of 0:00:01 +\d", shown)
    after_the_first = shown[shown.index("1 of 2 files") :]
    assert "a.wav" not in after_the_first


@pytest.mark.usefixtures("is_terminal")
def test_a_line_beside_the_bars_is_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    long = "[bold]12[/bold] 'x' " + "word " * 100
    ProgressBars(1, quiet=False).say(f"{long}\x1b[2J")
    assert capsys.readouterr().err == f"{long}\\x1b[2J\n"
    ProgressBars(1, quiet=True).say(long)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("is_terminal", "quiet"), [(True, True), (False, False)], indirect=["is_terminal"])
@pytest.mark.usefixtures("is_terminal")
def test_there_is_no_bar_where_nobody_sees_it(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars(2, quiet)
    with bars.shown():
        bar = bars.begin("a.wav")
        bars.move(bar, 1.0, 2.0)
        bars.finish(bar)
    assert capsys.readouterr().err == ""
