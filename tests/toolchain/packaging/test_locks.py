"""constraints.txt resolves from the package index alone, for each Python and platform that README names."""

import re
import tomllib
from itertools import chain, product
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
