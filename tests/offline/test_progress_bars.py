"""Bars as they appear on a terminal, and what is written where there is none."""

from __future__ import annotations

import re

import pytest

from asr_server.offline.progress import ProgressBars

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
        first = bars.start("[red]a.wav\x07")
        bars.move(first, 100.4, 200.0)
        bars.finish(first)
        second = bars.start("b.wav")
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
def test_one_recording_needs_no_bar_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars(1, quiet=False)
    with bars.shown():
        bar = bars.start("a.wav")
        bars.move(bar, 1.0, 2.0)
        bars.finish(bar)
    written = capsys.readouterr().err
    assert "a.wav" in written
    assert "all " not in plain(written)
    assert written.rindex("\x1b[2K") > written.rindex("a.wav"), "the bars are taken away at the end"


@pytest.mark.usefixtures("is_terminal")
def test_a_bar_is_half_full_at_half_of_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars(1, quiet=False)
    with bars.shown():
        bars.move(bars.start("a.wav"), 50.0, 100.0)
    written = capsys.readouterr().err
    (bar,) = set(re.findall("([━╸╺]+) 0:00:50 of 0:01:40", plain(written)))
    assert bar.index("╺") == len(bar) / 2
    assert written.rindex("\x1b[2K") > written.rindex("a.wav"), "a bar that is not full is taken away too"


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
        bar = bars.start("a.wav")
        bars.move(bar, 1.0, 2.0)
        bars.finish(bar)
    assert capsys.readouterr().err == ""
