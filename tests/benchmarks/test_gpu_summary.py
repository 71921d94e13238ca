"""What is printed last of a call on a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_summary import junit

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
