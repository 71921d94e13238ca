"""Who may import whom: one rule for processes, no circle, and no torch in the API process."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "asr_server"
EVERYBODY = {
    *("checkpoint", "config", "core", "errors", "language_codes"),
    *("levels", "machine", "metrics", "process", "telemetry"),
}
CORE = {
    "protocols": {"api"},
    "api": {"audio", "dispatch", "formats", "transcription"},
    "transcription": {"audio", "dispatch"},
    "audio": set(),
    "formats": set(),
    "dispatch": {"transport"},
    "transport": set(),
    "replica": {"engine", "transport"},
    "engine": {"model", "transport"},
    "model": set(),
    "metrics": {"transport"},
}
# Of the API process:
FRONT = {"api", "audio", "dispatch", "formats", "protocols", "transcription", "transport"}
ANNEXES = {
    "annexes.alignment": {"api", "audio", "dispatch", "formats", "transcription"},
    "annexes.compat": {"api", "audio", "formats", "transcription"},
    "annexes.deepgram": {"annexes.realtime", "api", "audio"},
    "annexes.jobs": {"api", "audio", "dispatch", "formats", "transcription", "transport"},
    "annexes.keys": {"api"},
    "annexes.model_loading": {"api"},
    "annexes.model_sources": {"model"},
    "annexes.monitoring": FRONT,
    "annexes.offline": {
        *("annexes.model_sources", "annexes.ray", "annexes.speakers"),
        *("audio", "dispatch", "formats", "transcription"),
    },
    "annexes.page": set(),
    "annexes.ray": {"annexes.model_sources", "dispatch", "replica", "transport"},
    "annexes.realtime": {"annexes.speakers", "api", "audio", "dispatch", "transcription"},
    "annexes.speakers": {"api", "audio", "transcription"},
    "annexes.wyoming": {"annexes.realtime", "api", "audio", "transcription"},
}
MAY_IMPORT = {
    **CORE,
    **ANNEXES,
    "server": {*ANNEXES, *FRONT} - {"annexes.offline"},
    "cli": {*ANNEXES, "formats", "server"},
}
API_PROCESS = ("server", "cli", *FRONT, *ANNEXES.keys() - {"annexes.model_sources", "annexes.ray"})
EXTRAS = ("jobs", "ray", "traces", "wyoming")  # what features that are off by default need
# The engine in the API process, for tests and debugging.
INLINE = ("asr_server.dispatch.executors", "asr_server.replica")

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.walk(ast.parse(path.read_text()))
    return [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(module: str) -> Iterator[str]:
    """Each module of ours that this one imports, at the top, in a function or for types alone."""
    for node in import_statements(MODULES[module]):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(level=0, module=str(source)):
                names = [f"{source}.{alias.name}" for alias in node.names]
            case ast.ImportFrom():
                raise AssertionError("relative imports hide who imports whom")
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name not in ("", "asr_server", module):
                yield name


def folder_of(module: str) -> str:
    _, folder, *inner = module.split(".")
    return f"annexes.{inner[0]}" if folder == "annexes" and inner else folder


@pytest.mark.parametrize("folder", sorted({folder_of(module) for module in MODULES if "." in module}))
def test_each_folder_imports_only_what_it_may(folder: str) -> None:
    allowed = (
        MAY_IMPORT.get(folder, set()) | EVERYBODY | {folder} | ({"cli"} if folder == "__main__" else set())
    )
    wrong = [
        (module, imported)
        for module in MODULES
        if "." in module and folder_of(module) == folder
        for imported in imports_of(module)
        if folder_of(imported) not in allowed and (module, imported) != INLINE
    ]
    assert wrong == []


def test_the_core_imports_no_annex() -> None:
    assert not any(imported.startswith("annexes") for allowed in CORE.values() for imported in allowed)


def test_no_folder_imports_back_up() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_no_import_runs_in_a_circle() -> None:
    graph = {module: set(imports_of(module)) for module in MODULES if MODULES[module].name != "__init__.py"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1]))


@pytest.mark.slow
def test_what_the_api_process_runs_imports_no_torch() -> None:
    modules = [module for module in MODULES if "." in module and folder_of(module) in API_PROCESS]
    imports = "".join(f"import {module}\n" for module in sorted(modules))
    code = f"import sys\n{imports}sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shared_types_import_nothing_of_ours() -> None:
    assert list(imports_of("asr_server.core")) == []
    assert list(imports_of("asr_server.errors")) == []


@pytest.mark.parametrize(
    ("folder", "never"),
    [("benchmarks", "tests|tools"), ("tools", "tests"), ("asr_server", "benchmarks|tests|tools")],
)
def test_what_tests_share_with_benchmarks_and_tools_lies_in_benchmarks(folder: str, never: str) -> None:
    wrong = [
        path.name
        for path in (PACKAGE.parent / folder).rglob("*.py")
        if re.search(rf"^\s*(from|import) ({never})\b", path.read_text(), re.MULTILINE)
    ]
    assert wrong == []


def test_what_the_server_imports_is_declared() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    declared = {
        distribution_name(entry)
        for entry in chain(project["dependencies"], *(optional[name] for name in EXTRAS))
    }
    declared.add("triton")  # torch brings it where it can be used
    known = {"asr_server", *sys.stdlib_module_names}.union(*map(packages_of, declared))
    imported = {package for path in MODULES.values() for package in packages_imported(path)}
    assert imported - known == set()


def packages_of(distribution: str) -> set[str]:
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return {distribution}
    if listed := installed.read_text("top_level.txt"):
        return {*listed.split()}
    return {file.parts[0].removesuffix(".py") for file in installed.files or ()}


def packages_imported(path: Path) -> Iterator[str]:
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def distribution_name(requirement: str) -> str:
    """`Foo_bar[extra]>=1` as `foo-bar`."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()
