"""The entry of the command, before there is anything to stop in order."""

from __future__ import annotations

import signal
import subprocess
import sys


def test_ctrl_c_while_modules_load_ends_it_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "asr_server", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if line.endswith("click\n"):  # the first thing that the command line loads; much is to follow
                break
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.wait(30) == -signal.SIGINT
