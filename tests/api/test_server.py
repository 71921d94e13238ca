"""What a server has made ready before the first request, and how it ends when it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asr_server.api.server import ENGINE_FAILED
from tests.conftest import Server

SERVE = (sys.executable, "-m", "asr_server", "serve", "--port", "0")


def test_the_decode_libraries_load_before_the_engine_so_that_no_upload_waits_for_them(server: Server) -> None:
    children = sorted(psutil.Process(server.process.pid).children(), key=psutil.Process.create_time)
    assert "asr_server.audio.ffmpeg_process" in children[0].cmdline()


@pytest.mark.slow
def test_an_engine_that_never_starts_ends_the_server_with_a_line_and_a_status(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # too long for the path of a socket
    folder.mkdir()
    ended = subprocess.run(
        SERVE,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == ENGINE_FAILED
    assert "the engine could not be started: replica 0 failed: OSError" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not list(folder.iterdir())
