"""The file of `--usage-log`: a JSON line for each request that used a key, for bills.

A thread writes, so that a slow disk holds up no request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from asr_server import metrics
from asr_server.telemetry import current_request_id

MAX_WAITING: Final = 10_000  # lines
CLOSE_LIMIT_S: Final = 5.0

logger = logging.getLogger(__name__)


class UsageLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._is_closing = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="usage log", daemon=True)
        self._thread.start()

    def add(self, stats: metrics.RequestStats, **outcome: int) -> None:
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": current_request_id.get(),
            "key": stats.key or None,
            "model": stats.model or None,
            "audio_s": round(stats.audio_s, 3),
        }
        try:
            self._lines.put_nowait(json.dumps(entry | outcome).encode() + b"\n")
        except queue.Full:
            metrics.usage_lines_lost.inc()

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_LIMIT_S`."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(b"")  # wakes the thread
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        while not (self._is_closing.is_set() and self._lines.empty()):
            lines = [self._lines.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            if lines := [line for line in lines if line]:
                self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        try:
            append(self._path, b"".join(lines))
            self._is_failing = False
        except OSError as error:
            metrics.usage_lines_lost.inc(len(lines))
            if not self._is_failing:
                logger.error("%s cannot be written, its lines are lost: %s", self._path, error.strerror)
            self._is_failing = True


def append(path: Path, data: bytes) -> None:
    """Raises OSError. Opens the file each time, so that it can be rotated."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(file, data) :]
    finally:
        os.close(file)
