"""What a server has made ready before the first request."""

from __future__ import annotations

import psutil

from tests.conftest import Server


def test_the_decode_libraries_load_before_the_engine_so_that_no_upload_waits_for_them(server: Server) -> None:
    children = sorted(psutil.Process(server.process.pid).children(), key=psutil.Process.create_time)
    assert "asr_server.audio.forkserver" in children[0].cmdline()
