"""Exit statuses of `asr-server transcribe` that need no engine; test_transcribe.py has the others."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from asr_server.annexes.offline.run import INTERRUPTED, TERMINATED
from asr_server.cli import main
from tests.contract.test_documented_names import DOCS, rows_of
from tests.support.until import wait_until
from tests.system.cli.test_transcribe import COMMAND, record, transcribe_here
from tests.unit.checkpoint.fake_hub import running_hub

LIMIT_S = 60.0


def test_help_and_docs_name_the_same_statuses() -> None:
    text = " ".join(CliRunner().invoke(main, ["transcribe", "--help"]).output.split())
    (told,) = re.findall(r"Exit status: (.*?)\.", text)
    documented = [
        number for cell, *_ in rows_of(DOCS / "command-line.md", "exit status") for number in cell.split(", ")
    ]
    assert re.findall(r"\d+", told) == documented
    assert [int(number) for number in documented[-2:]] == [INTERRUPTED, TERMINATED]


def test_a_run_that_skips_all_as_asked_has_status_0(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a result\n")
    done = transcribe_here(record(tmp_path / "a.wav"), "-o", tmp_path, "--skip-existing")
    assert done.returncode == 0
    assert done.stderr.decode().splitlines()[-1] == "1 skipped"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.trial)],
)
def test_a_signal_while_the_model_is_fetched_ends_it_without_a_traceback(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """TERM ends the process by itself, which a shell calls 143."""
    with running_hub(tmp_path) as hub:
        hub.silent = threading.Event()
        process = subprocess.Popen(
            [*COMMAND, str(record(tmp_path / "a.wav")), "--model", "someone/pocket"],
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: hub.requests or process.poll() is not None)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert "Traceback" not in errors
    assert ("stopped: interrupted" in errors) == (number == signal.SIGINT)
