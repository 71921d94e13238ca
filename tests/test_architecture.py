"""Who may import whom, and that the API process needs no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asr_server"
SHARED = {
    "child_process",
    "core",
    "config",
    "errors",
    "tokenizer",
    "telemetry",
    "checkpoint",
    "machine",
    "metrics",
    "key_file",
    "levels",
}
MAY_IMPORT = {
    "api": {"transcription", "audio", "dispatch", "channel", "formats"},
    "audio": set(),
    "channel": set(),
    "checkpoint": set(),
    "child_process": set(),
    "cli": {"api", "convert", "formats", "offline", "preflight", "remote"},
    "config": set(),
    "convert": {"model"},
    "core": set(),
    "dispatch": {"channel", "replica"},
    "engine": {"model", "channel"},
    "errors": set(),
    "formats": set(),
    "key_file": set(),
    "levels": set(),
    "machine": set(),
    "metrics": {"channel"},
    "model": set(),
    "offline": {"audio", "formats", "transcription", "dispatch"},
    "preflight": set(),
    "replica": {"channel", "engine"},
    "remote": {"audio", "formats", "offline"},
    "telemetry": set(),
    "tokenizer": {"checkpoint"},
    "transcription": {"audio", "dispatch"},
}
PACKAGES = sorted(
    path.stem
    for path in PACKAGE.iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.stem.startswith("__")
)
WITHOUT_TORCH = [
    "api",
    "audio",
    "checkpoint",
    "formats",
    "offline",
    "remote",
    "tokenizer",
    "transcription",
    "channel.tcp",
    "dispatch.dispatcher",
    "dispatch.processes",
    "dispatch.ray",
]


def imports_of(package: str) -> Iterator[tuple[str, str]]:
    """(file, package imported) for each import within the package, at the top or in a function."""
    paths = (
        [PACKAGE / f"{package}.py"]
        if (PACKAGE / f"{package}.py").exists()
        else (PACKAGE / package).rglob("*.py")
    )
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            for module in modules_of(node):
                if module.startswith("asr_server."):
                    yield str(path.relative_to(PACKAGE)), module.split(".")[1]


def modules_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(module)):
            return (
                [module] if module != "asr_server" else [f"asr_server.{alias.name}" for alias in node.names]
            )
        case ast.ImportFrom(level=level) if level:
            raise AssertionError("relative imports hide who imports whom")
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_imports_only_what_it_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | {"__version__"}
    allowed |= SHARED if package not in SHARED else {"core", "config", "errors", "machine"}
    wrong = [(file, imported) for file, imported in imports_of(package) if imported not in allowed]
    assert wrong == []


def test_the_shared_types_import_nothing_of_ours() -> None:
    assert list(imports_of("core")) == []
    assert list(imports_of("errors")) == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_api_process_needs_no_torch(module: str) -> None:
    code = f"import sys, asr_server.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tests_may_import_benchmarks_and_not_the_other_way() -> None:
    wrong = [
        path.name
        for path in (PACKAGE.parent / "benchmarks").rglob("*.py")
        if re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE)
    ]
    assert wrong == []
