"""Every example does what it says, on a real server. Those of LiveKit, pipecat and the browser run in
tests/contract/clients and tests/page."""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Server
from tests.contract.clients.recordings import write_wav
from tests.support import commands
from tests.support.speech import say

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
NODE_MODULES = ROOT / "tests/contract/node/node_modules"
SPOKEN = say("314", gap_s=0.3)
output_of = partial(commands.output_of, cwd=ROOT)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_wav(tmp_path / "speech.wav", SPOKEN)


def test_curl(server: Server, recording: Path) -> None:
    written = output_of(EXAMPLES / "curl.sh", recording, f"{server.url}/v1")
    text, srt, stream, words = (part.split("\n", 1)[1] for part in written.split("== ")[1:])
    assert text.strip() == SPOKEN.text
    assert " --> " in srt
    assert '"type":"transcript.text.done"' in stream
    assert '"word":"four"' in words


def test_the_python_client(server: Server, recording: Path) -> None:
    text, *words, streamed = output_of(
        sys.executable, EXAMPLES / "openai_python.py", recording, f"{server.url}/v1"
    ).splitlines()
    assert text == streamed == SPOKEN.text
    assert [line.split()[-1] for line in words] == SPOKEN.text.split()


@pytest.mark.skipif(
    not (NODE_MODULES / "openai").exists(), reason="not installed: tests/contract/node/install.sh"
)
def test_the_node_client(server: Server, recording: Path, tmp_path: Path) -> None:
    script = shutil.copy(EXAMPLES / "openai_node.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    text, *words, streamed = output_of("node", script, recording, f"{server.url}/v1").splitlines()
    assert text == streamed == SPOKEN.text
    assert [line.split()[-1] for line in words] == SPOKEN.text.split()


@pytest.mark.parametrize("rate", [16_000, pytest.param(24_000, marks=pytest.mark.trial)])
def test_the_microphone_client_on_a_recording(server: Server, tmp_path: Path, rate: int) -> None:
    recording = write_wav(tmp_path / "speech.wav", SPOKEN, rate)
    command = (sys.executable, EXAMPLES / "microphone.py", "--file", recording, "--url", f"{server.url}/v1")
    assert output_of(*command).splitlines()[-1] == f"> {SPOKEN.text}"


def test_the_microphone_client_takes_the_recording_that_ships(real_server: Server) -> None:
    command = ("--file", EXAMPLES / "speech.wav", "--url", f"{real_server.url}/v1")
    lines = output_of(sys.executable, EXAMPLES / "microphone.py", *command).splitlines()
    text = " ".join(line for line in lines if line.startswith("> "))
    assert re.findall(r"\w+", text) == re.findall(r"\w+", (EXAMPLES / "speech.txt").read_text())
