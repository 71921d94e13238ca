"""Look for known vulnerabilities of the pinned packages: python tools/audit.py PIP_AUDIT [CONSTRAINTS]

Status 1: there are some. Where no source of advisories answers, it says so in a line, with status 0.
"""

import json
import subprocess  # nosec B404
import sys
from typing import Any

OPTIONS = ("--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off")


def main(pip_audit: str, constraints: str = "constraints.txt") -> int:
    command = [pip_audit, "--requirement", constraints, *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # nosec B603
    packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"] if done.stdout else []
    known = [package for package in packages if "vulns" in package]
    if not known:
        print("vulnerabilities: not checked, as no source of advisories could be reached")
        return 0
    lines = [f"{name} {version}: {found}" for name, version, found in map(_vulnerabilities, known) if found]
    print("\n".join([*lines, f"vulnerabilities: {len(known)} of {len(packages)} packages checked"]))
    return 1 if lines else 0


def _vulnerabilities(package: dict[str, Any]) -> tuple[str, str, str]:
    found = [f"{each['id']} (mended in {_versions(each)})" for each in package["vulns"]]
    return package["name"], package["version"], ", ".join(found)


def _versions(vulnerability: dict[str, Any]) -> str:
    return ", ".join(vulnerability["fix_versions"]) or "no version"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
