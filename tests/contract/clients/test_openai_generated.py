"""The tests that openai-python generates, from its source distribution, against whisper-base."""

import os
import re
import subprocess
import tarfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.conftest import Server
from tests.contract.clients.recordings import write_wav
from tests.support.speech import say

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".cache" / "clients" / "openai"
GENERATED = tomllib.loads((Path(__file__).parent / "openai_generated.toml").read_text())
PREFIX = "tests.api_resources."
MOCKED = "path_params or test_speech or (test_calls and create)"  # these ask no server
OPTIONS = ("-q", "-o", "addopts=", "-k", f"not ({MOCKED})")
LIMIT_S = 1500


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the source distribution and put real values where the generator left placeholders."""
    archive = next(ENVIRONMENT.glob("openai-*.tar.gz"), None)
    if archive is None:
        pytest.skip("not installed: tests/contract/clients/install.sh openai")
    folder = tmp_path_factory.mktemp("openai")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (sources,) = folder.iterdir()
    for path in (sources / "tests" / "api_resources").rglob("*.py"):
        path.write_text(with_real_values(path.read_text()))
    return sources


def with_real_values(source: str) -> str:
    for placeholder, value in GENERATED["placeholders"].items():
        source = source.replace(placeholder, value)
    return source


def run(sources: Path, server: Server, recording: Path) -> dict[str, str | None]:
    """Run the tests and return the failure of each that was not skipped; None where it passed."""
    report = sources / "report.xml"
    folders = [f"tests/api_resources/{folder}" for folder in GENERATED["folders"]]
    subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-m", "pytest", *OPTIONS, "--junitxml", report, *folders],
        cwd=sources,
        env={
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))
        }
        | {"TEST_API_BASE_URL": f"{server.url}/v1", "RECORDING": str(recording)},
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=False,
    )
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    return {name_of(case): failure_of(case) for case in cases}


def name_of(case: ElementTree.Element) -> str:
    return f"{case.attrib['classname']}.{case.attrib['name']}".removeprefix(PREFIX)


def failure_of(case: ElementTree.Element) -> str | None:
    failure = case.find("failure")
    failure = case.find("error") if failure is None else failure
    return None if failure is None else f"{failure.get('message')}\n{failure.text}"


def status_of(failure: str | None) -> int | None:
    found = re.search(r"Error code: (\d+)", failure or "")
    return int(found[1]) if found else None


def refusal_of(name: str) -> dict[str, Any]:
    """Return the entry of the list that covers this test; empty where the server must serve it."""
    return next((each for each in GENERATED["refused"] if fnmatchcase(name, f"{each['tests']}*")), {})


def is_as_listed(refusal: dict[str, Any], failure: str | None) -> bool:
    if not refusal:
        return failure is None
    return status_of(failure) == refusal["status"] and refusal.get("says", "") in (failure or "")


@pytest.mark.trial
@pytest.mark.timeout(1800)
def test_the_server_refuses_only_what_is_listed(sources: Path, real_server: Server, tmp_path: Path) -> None:
    failures = run(sources, real_server, write_wav(tmp_path / "speech.wav", say("314159")))
    wrong = {
        name: failure for name, failure in failures.items() if not is_as_listed(refusal_of(name), failure)
    }
    assert wrong == {}
    assert {refusal_of(name)["why"] for name, failure in failures.items() if failure} == {
        each["why"] for each in GENERATED["refused"]
    }
    served = {name.split(".")[1] for name, failure in failures.items() if failure is None}
    assert served >= {"test_transcriptions", "test_translations", "test_client_secrets"}


def test_the_tests_are_those_of_the_client_that_is_pinned() -> None:
    pinned = re.search(r"^openai==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    for name in ("openai.txt", "openai.sdist.txt"):
        assert re.search(rf"^openai(\[\w+\])?=={pinned[1]}\b", (Path(__file__).parent / name).read_text())
