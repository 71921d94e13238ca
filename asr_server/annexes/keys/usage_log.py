"""The file of `--usage-log`: a JSON line for each request that used a key, for bills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.types import Scope

from asr_server import metrics
from asr_server.api.middleware import SWITCHED
from asr_server.machine import in_daemon_thread
from asr_server.telemetry import current_request_id

MAX_WAITING: Final = 10_000  # lines
CLOSE_LIMIT_S: Final = 5.0

logger = logging.getLogger(__name__)


class UsageLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._is_failing = False
        self._writing: Future[None] | None = None  # in a thread
        self._has_lines = asyncio.Event()

    def on_begun(self, scope: Scope, stats: metrics.RequestStats) -> None:
        pass

    def on_ended(self, what: str, stats: metrics.RequestStats, figures: Mapping[str, Any]) -> None:
        if not stats.is_metered:
            return
        if len(self._lines) >= MAX_WAITING:
            metrics.usage_lines_lost.inc()
            return
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": current_request_id.get(),
            "key": stats.key or None,
            "model": stats.model or None,
            "audio_s": round(stats.audio_s, 3),
            "status": figures.get("status", SWITCHED),
        }
        entry |= {name: figures[name] for name in ("close_code",) if name in figures}
        self._lines.append(json.dumps(entry).encode() + b"\n")
        self._has_lines.set()

    async def run(self) -> None:
        """Write until cancelled, in a thread: a slow disk holds up no request."""
        while True:
            await self._has_lines.wait()
            await self._write()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                if self._writing is not None:
                    await asyncio.wrap_future(self._writing)
                await self._write()

    async def _write(self) -> None:
        lines, self._lines = self._lines, []
        self._has_lines.clear()
        if not lines:
            return
        self._writing = in_daemon_thread(partial(append, self._path, b"".join(lines)), "usage log")
        try:
            await asyncio.wrap_future(self._writing)
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
