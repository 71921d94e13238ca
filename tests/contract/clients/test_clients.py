"""Programs that others have written for OpenAI's API, by base URL alone, each in its own environment."""

import os
from pathlib import Path

import pytest

from asr_server.core import SAMPLE_RATE
from tests.conftest import Server, run_server
from tests.contract.clients.recordings import write_wav
from tests.support.commands import output_of
from tests.support.speech import say

ROOT = Path(__file__).parents[3]
SPOKEN = say("31415", gap_s=[0.2, 0.2, 1.2, 0.2, 0.5])

pytestmark = pytest.mark.trial


def lines_of(client: str, script: str, *arguments: str | Path) -> list[str]:
    """What the script writes in the client's environment."""
    environment = ROOT / ".cache" / "clients" / client
    if not (environment / "installed.txt").exists():
        pytest.skip(f"not installed: tests/contract/clients/install.sh {client}")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return output_of(environment / "bin" / "python", ROOT / script, *arguments, env=own).splitlines()


OURS = "tests/contract/clients"
BY_OPENAI = (
    f"json: {SPOKEN.text}",
    f"words: {SPOKEN.text}",
    "srt: True",
    f"text: {SPOKEN.text}",
    f"stream: {SPOKEN.text}",
    f"async: {SPOKEN.text}",
    "refused: 400 file",
    "models: True",
)
WHOLE = f"whole: {SPOKEN.text}"


def test_litellms_files_and_batches(tmp_path: Path) -> None:
    recording = write_wav(tmp_path / "speech.wav", SPOKEN)
    script = f"{OURS}/litellm_batch_client.py"
    with run_server("--jobs-dir", str(tmp_path / "jobs")) as server:
        assert lines_of("litellm", script, recording, f"{server.url}/v1") == [
            "batch: completed 7 1",
            f"text: talk {SPOKEN.text}",
            "listed: True",
            "deleted: True",
        ]


@pytest.mark.parametrize(
    ("client", "script", "lines"),
    [
        (
            "litellm",
            f"{OURS}/litellm_client.py",
            (*BY_OPENAI[:3], f"async: {SPOKEN.text}", f"stream: {SPOKEN.text}", "refused: 400"),
        ),
        ("openai-new", f"{OURS}/openai_client.py", ("library: httpx2", *BY_OPENAI)),
        ("openai-old", f"{OURS}/openai_client.py", ("library: httpx", *BY_OPENAI)),
        ("agents", f"{OURS}/agents_client.py", (WHOLE, "live: three one four")),
        ("speechrecognition", f"{OURS}/speechrecognition_client.py", (f"text: {SPOKEN.text}",)),
        ("livekit", "examples/livekit_stt.py", (WHOLE, "live: three one four", "live: one five")),
        (
            "livekit",
            f"{OURS}/livekit_deepgram_client.py",
            (WHOLE, "live: three one four 3", "live: one five 2"),
        ),
        ("pipecat", "examples/pipecat_stt.py", (WHOLE, f"live: {SPOKEN.text}")),
    ],
)
def test_a_client_hears_what_was_said(
    server: Server, tmp_path: Path, client: str, script: str, lines: tuple[str, ...]
) -> None:
    live_at_24_khz = client in ("agents", "livekit")
    recording = write_wav(tmp_path / "speech.wav", SPOKEN, 24_000 if live_at_24_khz else SAMPLE_RATE)
    assert lines_of(client, script, recording, f"{server.url}/v1") == list(lines)


def test_pipecats_deepgram_live(server: Server, tmp_path: Path) -> None:
    one_turn = say("314", gap_s=[0.2, 0.2, 0.5])
    recording = write_wav(tmp_path / "speech.wav", one_turn)
    script = f"{OURS}/pipecat_deepgram_client.py"
    assert lines_of("pipecat", script, recording, server.url) == [f"live: {one_turn.text}"]


def test_vercels_ai_sdk(server: Server, tmp_path: Path) -> None:
    folder = Path(__file__).parent / "vercel"
    if not (folder / "node_modules/installed.json").exists():
        pytest.skip("not installed: tests/contract/clients/install.sh vercel")
    recording = write_wav(tmp_path / "speech.wav", SPOKEN)
    assert output_of("node", folder / "transcribe.mjs", recording, f"{server.url}/v1").splitlines() == [
        f"whisper-1: {SPOKEN.text}",
        f"whisper-1 with options: {SPOKEN.text}, true",
        f"gpt-4o-transcribe: {SPOKEN.text}",
        f"gpt-4o-transcribe with options: {SPOKEN.text}, false",
    ]


def test_langchain_loader(server: Server, tmp_path: Path) -> None:
    write_wav(tmp_path / "speech.wav", SPOKEN)
    lines = lines_of("langchain", "tests/contract/clients/langchain_client.py", tmp_path, f"{server.url}/v1")
    documents = [line for line in lines if line.startswith("document: ")]
    assert documents == [f"document: {SPOKEN.text}"] * 3
