"""What is printed last of a call on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_summary import junit, main

JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="1" failures="1"
skipped="0" tests="3" time="2.5"><testcase name="test_good" time="0.1" />
<testcase name="test_bad" time="0.1"><failure message="assert 1 == 2&#10; more">...</failure></testcase>
<testcase name="test_broken" time="0.1"><error message="failed on setup">...</error></testcase>
</testsuite></testsuites>"""


def test_failed_tests_are_named_with_the_first_line_of_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "cuda-tests.xml"
    path.write_text(JUNIT)
    assert list(junit(path)) == [
        "3 tests, 1 failures, 1 errors, 0 skipped in 2.5 s",
        "failure: test_bad: assert 1 == 2",
        "error: test_broken: failed on setup",
    ]


def test_a_result_that_cannot_be_read_keeps_no_other_from_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cuda-tests.xml").write_text("<testsuites")
    (tmp_path / "parity.json").write_text('{"figures": [{"wh')
    (tmp_path / "turbo.json").write_text('{"figures": {}}')
    (tmp_path / "real.json").write_text('{"figures": []}')
    monkeypatch.setattr("sys.argv", ["gpu_summary", str(tmp_path)])
    main()
    shown = capsys.readouterr().out
    assert shown.count("cannot be summarised") == 3
