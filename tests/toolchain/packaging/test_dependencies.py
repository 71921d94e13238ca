"""constraints.txt resolves from the package index alone, for each Python and platform that README names."""

import json
import re
import subprocess
import sys
import tomllib
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.toolchain.packaging.package_index import ROOT, uv

pytestmark = pytest.mark.slow
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEVER_PINNED = {"setuptools"}  # torch alone asks for it


def pins() -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def resolve(*words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Resolve the lock and return each package and its version."""
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")  # the oldest macOS that av has wheels for
    done = uv("pip", "compile", "pyproject.toml", "--constraint", "constraints.txt", "--no-header", *words)
    assert done.returncode == 0, done.stderr
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", done.stdout, re.MULTILINE)
    }


def targets() -> list[Any]:
    """Each pair in the trials; in the suite the oldest Python, and each platform for the newest."""
    in_suite = {(PYTHONS[0], PLATFORMS[0]), *product(PYTHONS[-1:], PLATFORMS)}
    return [
        pytest.param(*target, marks=[] if target in in_suite else [pytest.mark.trial])
        for target in product(PYTHONS, PLATFORMS)
    ]


@pytest.mark.parametrize(("python", "platform"), targets())
def test_the_server_resolves_to_wheels(python: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--python-version", python, "--python-platform", platform, "--only-binary", ":all:")
    resolved = resolve(*asked, monkeypatch=monkeypatch)
    assert resolved["torch"] == pins()["torch"]
    loose = {name for name in resolved if name not in pins() and not name.startswith(("nvidia-", "cuda-"))}
    assert loose <= NEVER_PINNED


@pytest.mark.parametrize("python", [pytest.param(PYTHONS[0], marks=pytest.mark.trial), PYTHONS[-1]])
def test_all_extras_resolve_together(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--all-extras", "--python-version", python, "--python-platform", PLATFORMS[0])
    resolved = resolve(*asked, monkeypatch=monkeypatch)
    assert resolved["triton"] == pins()["triton"]


def test_each_pin_is_a_version_that_the_wheel_allows() -> None:
    asked = map(Requirement, [*PROJECT["dependencies"], *chain(*EXTRAS.values())])
    wrong = [
        str(requirement)
        for requirement in asked
        if requirement.name != PROJECT["name"]
        and not requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])
    ]
    assert wrong == []


def test_each_dependency_has_a_lower_and_an_upper_bound() -> None:
    for requirement in map(Requirement, PROJECT["dependencies"]):
        operators = {bound.operator for bound in requirement.specifier}
        assert operators == {">=", "<"}, requirement


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


@pytest.mark.trial
def test_the_bill_of_materials_has_each_package_that_the_wheel_installs() -> None:
    subprocess.run(["make", "sbom"], cwd=ROOT, check=True, timeout=1800)
    document = json.loads((ROOT / "dist" / "asr-server.cdx.json").read_text())
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "asr-server")
    versions = {canonicalize_name(each["name"]): each["version"] for each in document["components"]}
    wanted = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]}
    assert wanted <= versions.keys()
    assert not {"pytest", "ruff", "pip", "bandit"} & versions.keys()
    local = {name: version.partition("+")[0] for name, version in versions.items() if name in pins()}
    assert local == {name: pins()[name] for name in local}
