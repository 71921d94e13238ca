"""Shows progress bars on a terminal, lines where there is none, and nothing when asked to be quiet.

Used by `batch.py`. Writes to standard error only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from asr_server.offline.text import printable


class ProgressBars:
    """A bar for each file under way, and one for all files where there are several."""

    def __init__(self, num_files: int, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[done]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._num_files = num_files
        self._num_done = 0
        self._all = self._progress.add_task("all", total=num_files, visible=num_files > 1, done="")

    @contextmanager
    def shown(self) -> Iterator[ProgressBars]:
        with self._progress:
            yield self

    def start(self, name: str) -> TaskID:
        return self._progress.add_task(printable(name), total=None, done="")

    def move(self, bar: TaskID, done_s: float, total_s: float | None) -> None:
        """Shows `done_s` seconds transcribed of `total_s`; None: the file does not say how long it is."""
        known = total_s is not None and total_s > 0
        done = f"{_clock(done_s)} of {_clock(total_s)}" if known and total_s else _clock(done_s)
        self._progress.update(
            bar, completed=done_s, total=total_s if known else None, done=done, refresh=True
        )

    def finish(self, bar: TaskID) -> None:
        self._progress.remove_task(bar)
        self._num_done += 1
        done = f"{self._num_done} of {self._num_files} files"
        self._progress.update(self._all, completed=self._num_done, done=done)

    def say(self, line: str) -> None:
        """A line that stays, above the bars. Quiet says nothing."""
        if not self._quiet:
            self._console.print(printable(line))


def _clock(time_s: float) -> str:
    return str(timedelta(seconds=round(time_s)))
