"""`make sbom` lists what the wheel installs, in the versions that are pinned."""

import json
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.toolchain.packaging.package_index import ROOT
from tests.toolchain.packaging.test_locks import PROJECT, pins


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
