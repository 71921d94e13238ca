"""Cases of a dry run in one process: each is run once, and one that fails does not end the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_workers_share_the_cases_and_name_those_that_fail(tmp_path: Path) -> None:
    cases = ["benchmarks.kernels --arch", "benchmarks.nothing", "benchmarks.dry_run cases.txt 0"]
    (tmp_path / "cases.txt").write_text("\n".join(cases))
    (tmp_path / "claimed-2").touch()  # by another worker
    command = [sys.executable, "-m", "benchmarks.dry_run", str(tmp_path / "cases.txt"), "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("== ")]
    assert [line.split()[1] for line in lines] == ["failed", "failed"]
    assert lines[0].endswith("benchmarks.kernels --arch")
    assert lines[1].endswith("benchmarks.nothing ")
    assert "No module named 'benchmarks.nothing'" in ran.stderr
