"""/health, asked from a process of its own, so that a busy client does not count against the server.

python -m benchmarks.health URL       prints when each answer came and how long it took
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

EVERY_S = 0.02


class HealthProbe:
    def __init__(self, url: str) -> None:
        self._answers: list[tuple[float, float]] = []  # when, seconds
        command = [sys.executable, "-m", "benchmarks.health", url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be cut off
                    when, latency_s = map(float, line.split())
                    self._answers.append((when, latency_s))

    def latencies_since(self, started: float) -> list[float]:
        """Those of every answer that came after that `time.perf_counter()`, which all processes share."""
        return self.latencies_between(started, float("inf"))

    def latencies_between(self, started: float, ended: float) -> list[float]:
        return [latency_s for when, latency_s in self._answers if started <= when < ended]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()


@contextmanager
def probing_health(url: str) -> Iterator[HealthProbe]:
    probe = HealthProbe(url)
    try:
        yield probe
    finally:
        probe.stop()


def main() -> None:
    """Asks over one connection, by a client that costs little: it shares the machine with the server."""
    url = urlsplit(sys.argv[1])
    connection = HTTPConnection(url.hostname or "", url.port, timeout=60)
    while True:
        started = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        answered = time.perf_counter()
        if response.status != 200:
            raise RuntimeError(f"/health: {response.status}")
        print(answered, answered - started, flush=True)
        time.sleep(max(0.0, started + EVERY_S - answered))


if __name__ == "__main__":
    main()
