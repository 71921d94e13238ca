"""`make` does what it says, also on a machine that has Python and make alone."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.commands import run_command
from tests.toolchain.packaging.package_index import ROOT

FETCHED = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
STAMPS = ("serve", "test", "trial")
NOTE_CALL = '#!/bin/sh\necho "environment: $*"\n'
OTHER_SCRIPTS = (
    *("tools/install.sh", "tests/install-browser.sh"),
    *(
        "tests/contract/node/install.sh",
        "tests/contract/clients/install.sh",
        "tests/toolchain/deploy/install.sh",
    ),
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with an environment that notes its calls, and a system's Python without packages."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "harness/speech/install.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in OTHER_SCRIPTS:
        write_program(tmp_path / name, "#!/bin/sh\n")
    write_program(tmp_path / ".venv/bin/python", NOTE_CALL)
    for name, message in (("python3", "Traceback"), ("apt-get", "no packages")):
        write_program(tmp_path / "bin" / name, f"#!/bin/sh\necho {message} >&2\nexit 1\n")
    for stamp in STAMPS:
        (tmp_path / ".venv" / f"{stamp}.stamp").touch()
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("target", ["test", "trial", "bench"])
def test_a_target_runs_the_environments_python_and_no_other(checkout: Path, target: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    own = inherited | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    done = run_command("make", target, cwd=checkout, env=own)
    assert done.returncode == 0, done.stderr
    assert "environment: -m asr_server models fetch base tiny.en" in done.stdout
    assert "Traceback" not in done.stderr
    assert "cannot be fetched" not in done.stderr


def test_every_page_is_in_the_sites_navigation_or_left_out_of_it_by_name() -> None:
    """mkdocs refuses a page that is in neither."""

    def pages(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [page for part in entry.values() for page in pages(part)]
        return [page for part in entry for page in pages(part)] if isinstance(entry, list) else [str(entry)]

    site = yaml.safe_load((ROOT / "tools/site/mkdocs.yml").read_text())
    files = subprocess.check_output(["git", "ls-files", "*.md", ":!.github"], cwd=ROOT, text=True).split()
    left_out = [rule.strip("/").removesuffix("/*") + "/" for rule in site["not_in_nav"].split()]
    rest = {page for page in set(files) - set(pages(site["nav"])) if not page.startswith(tuple(left_out))}
    assert rest == set()


@pytest.mark.trial
def test_the_site_has_every_page_and_fetches_nothing_from_elsewhere() -> None:
    """mkdocs refuses a broken link."""
    subprocess.run(["make", "site"], cwd=ROOT, check=True, timeout=600)
    site = ROOT / "dist" / "site"
    start = (site / "index.html").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / "docs" / page.with_suffix(".html").name).is_file()
        assert f'href="docs/{page.stem}.html"' in start
    assert not [page for page in site.rglob("*.html") if FETCHED.search(page.read_text("utf-8"))]
