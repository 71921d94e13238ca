"""Run uv on the configured package index alone, without this machine's wheels and settings."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command

ROOT = Path(__file__).parents[3]
LIMIT_S = 1800  # PyTorch with CUDA has 2.8 GB


def uv(*words: str) -> subprocess.CompletedProcess[str]:
    """Run uv on the configured index. Skips the test if there is no uv or no index."""
    need_index()
    return _run(*words)


@functools.cache
def need_index() -> None:
    if not _program():
        pytest.skip("uv is not installed: pip install '.[test]'")
    probe = _run("pip", "install", "--dry-run", "--no-cache", "--reinstall", "--no-deps", "annotated-types")
    if probe.returncode:
        pytest.skip(f"the package index cannot be reached: {probe.stderr.strip().splitlines()[-1]}")


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    own = clean_environment() | {"VIRTUAL_ENV": sys.prefix}
    return run_command(_program(), *words, "--no-config", env=own, cwd=ROOT, timeout=LIMIT_S)


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of pip and uv, but for the certificates and the index."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    clean["PIP_CONFIG_FILE"] = os.devnull
    if certificates := os.environ.get("PIP_CERT"):
        clean["PIP_CERT"] = certificates
    if index := _configured_index():
        clean |= {"UV_DEFAULT_INDEX": index, "PIP_INDEX_URL": index}
    return clean


def _program() -> str:
    return (
        shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or ""
    )


@functools.cache
def _configured_index() -> str:
    """Return pip's main index without its extra indexes and folders of wheels. Empty: PyPI."""
    if "PIP_INDEX_URL" in os.environ:
        return os.environ["PIP_INDEX_URL"]
    return run_command(sys.executable, "-m", "pip", "config", "get", "global.index-url").stdout.strip()
