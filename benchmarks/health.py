"""/health, asked from a process of its own, so that a busy client does not count against the server.

python -m benchmarks.health URL       prints when each answer came and how long it took
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

EVERY_S = 0.05


class HealthProbe:
    def __init__(self, url: str) -> None:
        self._answers: list[tuple[float, float]] = []  # when, seconds
        command = [sys.executable, "-m", "benchmarks.health", url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # the last one may be cut off
                when, latency_s = map(float, line.split())
                self._answers.append((when, latency_s))

    def latencies_since(self, started: float) -> list[float]:
        """Those of every answer that came after that `time.perf_counter()`, which all processes share."""
        return [latency_s for when, latency_s in self._answers if when >= started]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def probing_health(url: str) -> Iterator[HealthProbe]:
    probe = HealthProbe(url)
    try:
        yield probe
    finally:
        probe.stop()


def main() -> None:
    with httpx.Client(base_url=sys.argv[1], timeout=60) as client:
        while True:
            started = time.perf_counter()
            client.get("/health").raise_for_status()
            answered = time.perf_counter()
            print(answered, answered - started, flush=True)
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
