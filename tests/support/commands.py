"""Commands that run to their end."""

import subprocess
from pathlib import Path
from typing import Any

from tests.support.until import LIMIT_S


def run_command(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return the command's status, whatever it is, and what it wrote; `options` are subprocess.run's."""
    options = {"timeout": LIMIT_S, "check": False} | options
    return subprocess.run(words, capture_output=True, text=True, **options)


def output_of(*words: str | Path, **options: Any) -> str:
    """Return what a command wrote to standard output that ended with status 0."""
    done = run_command(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
