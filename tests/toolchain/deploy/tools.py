"""Programs that check what lies in deploy/; tests of those that are not here are skipped."""

import shutil
from pathlib import Path

import pytest

from tests.support.commands import output_of

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FETCHED = ROOT / ".cache" / "deploy"


def path_of(name: str) -> str:
    """Return the program's path, in .cache/deploy or on this machine; skip where it is not here."""
    fetched = [path for path in (FETCHED / name, FETCHED / "venv/bin" / name) if path.exists()]
    program = str(fetched[0]) if fetched else shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not here: tests/toolchain/deploy/install.sh")
    return program


def run_tool(name: str, *arguments: str | Path, stdin: str = "") -> str:
    """Run a program and return its output."""
    return output_of(path_of(name), *arguments, input=stdin)
