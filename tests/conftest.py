"""One real server for the whole session: `asr-server serve`, the embedded model, a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, NamedTuple

import httpx
import pytest

import asr_server.engine  # noqa: F401  before any test imports torch: it settles how OpenMP's threads wait

START_LIMIT_S = 100.0
SIGN = "listening on "


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    log: IO[str]  # what it has written, at the level of debug

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def lines(self) -> list[str]:
        """All that it has logged so far."""
        return _written(self.log).splitlines()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "asr_server", "serve", "--port", "0", "--log-level", "debug"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            server = Server(_address(process, log), process, log)
            _wait_until_ready(server, log)
            yield server
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM), "the server did not stop in order"


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(SIGN):
            return line.removeprefix(SIGN).strip()
    raise AssertionError(f"the server did not start:\n{_written(log)}")


def _wait_until_ready(server: Server, log: IO[str]) -> None:
    """Loading takes as long as it takes; /ready says when it is over."""
    deadline = time.monotonic() + START_LIMIT_S
    while server.get("/ready").status_code != 200:
        assert server.process.poll() is None, _written(log)
        assert time.monotonic() < deadline, _written(log)
        time.sleep(0.05)


def _written(log: IO[str]) -> str:
    """Read without moving the place where the server writes, which is the same open file's."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode()
