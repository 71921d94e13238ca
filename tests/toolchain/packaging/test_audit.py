"""`make audit`: what it says of vulnerabilities, with answers in place of pip-audit's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.toolchain.packaging.package_index import ROOT

CLEAN = {"name": "numpy", "version": "2.4.6", "vulns": []}
WEAK = {
    "name": "av",
    "version": "18.1.0",
    "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["18.1.1"], "aliases": [], "description": "…"}],
}
UNKNOWN = {"name": "own", "skip_reason": "Dependency not found on PyPI and could not be audited: own (1)"}


def audited(folder: Path, answer: list[dict[str, Any]] | None) -> tuple[int, list[str]]:
    """Return status and lines for an answer; None: pip-audit fails without one."""
    pip_audit = folder / "pip-audit"
    text = "" if answer is None else json.dumps({"dependencies": answer, "fixes": []})
    pip_audit.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit 1\n" if text else "#!/bin/sh\nexit 1\n")
    pip_audit.chmod(0o755)
    command = [sys.executable, "tools/audit.py", str(pip_audit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_package_with_a_known_vulnerability_fails_and_is_named(tmp_path: Path) -> None:
    status, lines = audited(tmp_path, [CLEAN, WEAK, UNKNOWN])
    assert status == 1
    assert lines == ["av 18.1.0: PYSEC-2026-1 (mended in 18.1.1)", "vulnerabilities: 2 of 3 packages checked"]


def test_packages_without_known_vulnerabilities_pass(tmp_path: Path) -> None:
    assert audited(tmp_path, [CLEAN]) == (0, ["vulnerabilities: 1 of 1 packages checked"])


@pytest.mark.parametrize("answer", [None, [UNKNOWN]])
def test_without_a_source_of_advisories_one_line_says_that_nothing_was_checked(
    tmp_path: Path, answer: list[dict[str, Any]] | None
) -> None:
    status, lines = audited(tmp_path, answer)
    assert (status, len(lines)) == (0, 1)
    assert "not checked" in lines[0]
