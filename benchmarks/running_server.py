"""A real server in a process of its own, for as long as a block runs."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

START_LIMIT_S = 300.0
ENDING_S = 5.0  # in which a server that has closed its port prints why


@contextmanager
def running_server(*arguments: str, start_limit_s: float = START_LIMIT_S) -> Iterator[str]:
    """Starts `asr-server serve ARGUMENTS` on a free port and yields its URL once it can take work.

    Raises RuntimeError, with what the server printed, when it ends or takes too long to become ready.
    """
    command = [sys.executable, "-m", "asr_server", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output = _Output(process)
        deadline = time.monotonic() + start_limit_s
        url = output.url(start_limit_s)
        _until_ready(url, output, deadline)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.join()


class _Output(threading.Thread):
    """Reads what the server prints, so that it never waits for us, and keeps the last lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._process = process
        self._listening = threading.Event()
        self._url = ""
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines = [*self.lines[-200:], line]
            if line.startswith("listening on "):
                self._url = line.split()[-1]
                self._listening.set()
        self._process.stdout.close()
        self._listening.set()

    def url(self, limit_s: float) -> str:
        if not self._listening.wait(limit_s) or not self._url:
            raise RuntimeError("the server did not start:\n" + "".join(self.lines))
        return self._url

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


def _until_ready(url: str, output: _Output, deadline: float) -> None:
    with suppress(httpx.TransportError):  # it has ended: what it printed says more
        while time.monotonic() < deadline and not output.ended:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
            time.sleep(0.1)
    output.join(ENDING_S)
    raise RuntimeError("the server did not become ready:\n" + "".join(output.lines))
