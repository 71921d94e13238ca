"""What runs where nobody named a model: whisper-base, or the embedded one where base cannot be had."""

import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.conftest import run_server
from tests.support.commands import run_command

SPEECH = Path(__file__).parents[3] / "examples" / "speech.wav"
LIMIT = "hears English digits only, about 1 in 20 of them wrongly"
command = partial(run_command, sys.executable, "-m", "asr_server")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model was named, none is here, and neither hub nor package index can be reached."""
    monkeypatch.delenv("ASR_SERVER_MODEL")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")


@pytest.mark.usefixtures("nowhere")
def test_transcribe_warns_that_it_hears_digits_only_and_fails_where_it_hears_nothing() -> None:
    done = command("transcribe", "--quiet", SPEECH)
    assert (done.returncode, done.stdout) == (1, "")
    warning, failure = done.stderr.splitlines()
    assert warning.startswith(
        "Warning: transcribing with the embedded model whisper-digits, which hears English"
    )
    assert ", because base could not be had: the Hugging Face hub cannot be reached (" in warning
    assert "package index" in warning
    assert failure == f"failed: {SPEECH}: no speech recognised: whisper-digits, in the place of base, {LIMIT}"


@pytest.mark.usefixtures("nowhere")
def test_the_server_warns_in_its_log_its_answers_and_on_its_page() -> None:
    with run_server() as server:
        with SPEECH.open("rb") as recording:
            reply = httpx.post(
                f"{server.url}/v1/audio/transcriptions",
                files={"file": recording},
                data={"model": "whisper-1"},
                timeout=60,
            )
        assert reply.status_code == 200
        expected = f"{LIMIT}; it serves because base could not be fetched"
        assert reply.headers["x-model-limit"] == expected
        (first, *_) = server.get("/v1/models").json()["data"]  # which the page shows
        assert (first["id"], first["description"]) == ("whisper-digits", f"a Whisper model that {expected}")
        (warning,) = [line for line in server.lines() if "WARNING" in line]
        assert (
            f"serving the embedded model whisper-digits, which {LIMIT}, because base could not be had: "
            in warning
        )
