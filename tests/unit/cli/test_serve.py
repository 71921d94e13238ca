"""`asr-server serve` with settings that cannot work: what the operator sees, and how soon."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asr_server.config import EMBEDDED_MODEL
from tests.support.commands import run_command

pytestmark = pytest.mark.slow

LIMIT_S = 2.0  # of processor time, which is half as much where nothing else runs


class Refusal:
    """A server that was told to start and would not."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        before_s = _children_cpu_s()
        serve = (sys.executable, "-X", "importtime", "-m", "asr_server", "serve", "--port", "0")
        process = run_command(*serve, *arguments, env=os.environ | environment)
        self.cpu_s = _children_cpu_s() - before_s
        self.status = process.returncode
        lines = process.stderr.splitlines()
        self.lines = [line for line in lines if not line.startswith("import time:")]
        self.modules = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_wrong_settings_are_told_at_once_and_without_torch_wherever_they_come_from() -> None:
    refusal = Refusal("--replicas", "-1", ASR_SERVER_MAX_REALTIME_SESSIONS="0", ASR_SERVER_REUSE_PORT="maybe")
    named = [line.split()[1] for line in refusal.lines]
    assert (named, refusal.status) == (["--replicas", "--reuse-port", "--max-realtime-sessions"], 2)
    assert refusal.cpu_s < LIMIT_S
    assert "pydantic" in refusal.modules
    assert "torch" not in refusal.modules


def test_what_this_machine_lacks_is_told_before_torch_is_loaded() -> None:
    refusal = Refusal("--model", "./nowhere", "--ssl-certfile", "/nowhere/cert.pem")
    assert [line.split()[1] for line in refusal.lines] == ["--ssl-certfile", "--model"]
    assert refusal.status == 2
    assert "torch" not in refusal.modules
    assert refusal.cpu_s < LIMIT_S


def test_weights_that_cannot_be_read_end_the_server_with_one_line_and_a_status(tmp_path: Path) -> None:
    """Only loading the model shows it. All that the server writes is JSON, as it was told."""
    shutil.copytree(EMBEDDED_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights" * 100)
    serve = (sys.executable, "-m", "asr_server", "serve", tmp_path, "--port", "0", "--log-format", "json")
    process = run_command(*serve)
    assert (process.returncode, process.stdout) == (1, "")
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert lines[0]["message"].startswith("listening on http://127.0.0.1:")
    (failure,) = [line for line in lines if line["level"] not in ("info", "debug")]
    assert failure["level"] == "critical"
    assert failure["message"] == (
        f"the engine could not be started: the weights in {tmp_path} are damaged: fetch them again"
    )
    assert not any("exception" in line for line in lines)


def test_json_logs_announce_the_address_whatever_their_level() -> None:
    command = [sys.executable, "-m", "asr_server", "serve", "whisper-digits", "--port", "0"]
    command += ["--log-format", "json", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["message"].startswith("listening on http://")
        process.terminate()
        assert process.wait(60) == 0
