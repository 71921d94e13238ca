"""Takes the report of each line of a manifest: counts them, writes the error file, moves the bar."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asr_server.offline.inputs import reason_of
from asr_server.offline.outputs import OutputError

ERROR_FILE: Final = "errors.jsonl"
_LINE_EVERY_S: Final = 60.0  # where there is no terminal for a bar

Outcome = Literal["transcribed", "skipped", "failed"]


class LineReport(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """What became of one line."""

    offset: int  # of the line in the manifest, in bytes
    outcome: Outcome
    id: str = ""
    audio: str = ""
    error: str = ""  # of a line that failed
    duration_s: float = 0.0  # of a recording that was transcribed


class JobStopped(msgspec.Struct, frozen=True, tag=True):
    """From an actor that can go on with no line, in the place of reports."""

    reason: str


class Reports:
    """Open while the job runs. The error file has a line for each line that failed in this run."""

    def __init__(self, folder: Path, num_lines: int, quiet: bool) -> None:
        """Raises OutputError."""
        self.counts: dict[Outcome, int] = {"transcribed": 0, "skipped": 0, "failed": 0}
        self._audio_s = 0.0
        self._path = folder / ERROR_FILE
        self._num_lines = num_lines
        self._quiet = quiet
        self._told_at = time.monotonic()
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._has_bar = console.is_terminal and not quiet
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not self._has_bar,
            transient=True,
        )
        self._bar = self._progress.add_task("lines", total=num_lines)
        try:
            self._errors = self._path.open("wb")
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {reason_of(error)}") from error

    def __enter__(self) -> Reports:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._errors.close()

    def add(self, report: LineReport) -> None:
        """Raises OutputError where the error file cannot be written."""
        self.counts[report.outcome] += 1
        self._audio_s += report.duration_s
        if report.outcome == "failed":
            self._write_error(report)
        self._show()

    def numbers(self) -> str:
        counted = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items() if count)
        left = self._num_lines - sum(self.counts.values())
        return f"{counted or 'nothing done'}, {self._audio_s / 3600:.1f} h of audio" + (
            f", {left} lines not begun or not finished" if left > 0 else ""
        )

    def _write_error(self, report: LineReport) -> None:
        fields = {"offset": report.offset, "id": report.id, "audio": report.audio, "error": report.error}
        try:
            self._errors.write(msgspec.json.encode(fields) + b"\n")
            self._errors.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {reason_of(error)}") from error

    def _show(self) -> None:
        if self._has_bar:
            failed = f"lines, {self.counts['failed']} failed, {self._audio_s / 3600:.1f} h of audio"
            self._progress.update(self._bar, completed=sum(self.counts.values()), description=failed)
        elif not self._quiet and time.monotonic() - self._told_at >= _LINE_EVERY_S:
            self._told_at = time.monotonic()
            print(self.numbers(), file=sys.stderr, flush=True)
