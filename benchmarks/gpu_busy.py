"""How busy the GPU is, as nvidia-smi samples it."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_MS = 100
QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}")


class GpuBusy:
    """Samples of the share of time in which a kernel ran; none where there is no nvidia-smi."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # when, share
        self._process: subprocess.Popen[str] | None = None
        if (program := shutil.which("nvidia-smi")) is not None:
            self._process = subprocess.Popen([program, *QUERY], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=[self._process], daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            first = line.split(",")[0].strip()
            if first.isdigit():
                self._samples.append((time.perf_counter(), int(first) / 100))

    def share_since(self, started: float) -> float | None:
        """The mean from that `time.perf_counter()` to now."""
        samples = [share for when, share in self._samples if when >= started + EVERY_MS / 1000]
        return statistics.mean(samples) if samples else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def watching_the_gpu() -> Iterator[GpuBusy]:
    busy = GpuBusy()
    try:
        yield busy
    finally:
        busy.stop()
