"""Shows how far a download has come: a bar where somebody watches, else lines in the log."""

from __future__ import annotations

import logging
import os
import sys
import time
from types import TracebackType
from typing import Any, Final, Self

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES: Final = 10.0
_MB: Final = 1_000_000


class DownloadProgress:
    """Of one model; to be used in a `with` statement."""

    def __init__(self, what: str, num_bytes: int) -> None:
        """`what`: the model and where it comes from. `num_bytes` in all; 0: not known."""
        self._what = what
        self._num_bytes = num_bytes
        self._done = 0
        self._bar: Any = None
        self._task: Any = None
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._what, total=self._num_bytes or None)
            self._bar.start()
        else:
            logger.info(
                "fetching %s%s", self._what, f", {self._in_mb(self._num_bytes)}" if self._num_bytes else ""
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def reached(self, num_bytes: int) -> None:
        """So many bytes are here by now."""
        self._done = num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes)
        elif time.monotonic() - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = time.monotonic()
            logger.info("%s: %s of %s", self._what, self._in_mb(self._done), self._in_mb(self._num_bytes))

    def add(self, num_bytes: int) -> None:
        self.reached(self._done + num_bytes)

    @staticmethod
    def _in_mb(num_bytes: int) -> str:
        return f"{num_bytes / _MB:.0f} MB"
