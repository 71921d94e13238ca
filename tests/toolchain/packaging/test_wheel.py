"""The wheel works in fresh environments of each Python at hand, with weights that it fetches itself."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.conftest import run_server
from tests.page.browsing import CHROMIUM, LIMIT_MS, NEEDS_CHROMIUM
from tests.toolchain.packaging.package_index import ROOT, clean_environment, uv

pytestmark = [pytest.mark.trial, NEEDS_CHROMIUM]

SPEECH = ROOT / "examples" / "speech.wav"
TEXT = (ROOT / "examples" / "speech.txt").read_text()
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
PYTHONS = [sys.executable, *(str(path) for path in sorted(PYENV.glob("versions/3.1[2-9].*/bin/python")))]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist, beside the PyTorch that pip is configured for."""
    folder = tmp_path_factory.mktemp("wheels")
    built = uv("build", "--out-dir", str(folder))
    assert built.returncode == 0, built.stderr
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*asked, "--constraint", str(ROOT / "constraints.txt"), "torch"], check=False)
    return folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest would keep an environment of 5 GB."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("installer", "python"), [("pip", sys.executable), *(("uv", python) for python in PYTHONS)]
)
def test_new_installs_transcribe_and_serve(installer: str, python: str, wheels: Path, folder: Path) -> None:
    clean, fresh = clean_environment(), str(folder / "bin" / "python")
    wanted = [*map(str, wheels.glob("asr_server-*.whl")), "--constraint", str(ROOT / "constraints.txt")]
    wanted += ["--find-links", str(wheels)]
    if installer == "pip":
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([fresh, "-m", "pip", "install", "--quiet", *wanted], env=clean, check=True)
    else:
        assert uv("venv", "--clear", "--python", python, str(folder)).returncode == 0
        installed = uv("pip", "install", "--python", fresh, *wanted)
        assert installed.returncode == 0, installed.stderr
    command = [str(folder / "bin" / "asr-server"), "transcribe", str(SPEECH)]
    base = {"ASR_SERVER_MODEL": "base", "PYTHONSAFEPATH": "1"}  # the path has the wheel, not the checkout
    first, second = (base | {"HF_HOME": str(folder / name)} for name in ("transcribe", "serve"))
    assert subprocess.run(command, env=os.environ | first, stdout=subprocess.PIPE, text=True).stdout == TEXT
    with run_server(python=fresh, **second) as server:
        upload_on_the_page(server.url)


def upload_on_the_page(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.set_input_files("#files", SPEECH)
        expect(page.locator("#cards .transcript")).to_contain_text(TEXT.strip(), timeout=LIMIT_MS)
        browser.close()
