"""Show how far a run is, as bars on a terminal, and its outcome, on standard error."""

import sys
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from asr_server.annexes.offline.inputs import Failure
from asr_server.telemetry import printable


class ProgressBars:
    def __init__(self, num_files: int, quiet: bool, unit: str = "files") -> None:
        self._quiet, self._unit = quiet, unit
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.progress = Progress(
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
        self._all = self.progress.add_task("all", total=num_files, visible=num_files > 1, done="")

    def begin(self, name: str) -> TaskID:
        return self.progress.add_task(printable(name), total=None, done="")

    def move(self, bar: TaskID, done_s: float, total_s: float | None) -> None:
        done = f"{_clock(done_s)} of {_clock(total_s)}" if total_s else _clock(done_s)
        self.progress.update(bar, completed=done_s, total=total_s or None, done=done, refresh=True)

    def finish(self, bar: TaskID) -> None:
        self.progress.remove_task(bar)
        self.count()

    def count(self) -> None:
        self._num_done += 1
        done = f"{self._num_done} of {self._num_files} {self._unit}"
        self.progress.update(self._all, completed=self._num_done, done=done)

    def say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(printable(line))


def speed_of(audio_s: float, elapsed_s: float) -> str:
    return f"{audio_s:.1f} s of audio in {elapsed_s:.1f} s ({audio_s / elapsed_s:.1f} x)"


def _clock(time_s: float) -> str:
    return str(timedelta(seconds=round(time_s)))


SUCCESS, SOME_FAILED = 0, 1


@dataclass
class Summary:
    num_inputs: int = 0
    num_transcribed: int = 0
    num_skipped: int = 0
    audio_s: float = 0.0  # of the recordings transcribed
    elapsed_s: float = 0.0  # while the model was loaded, and recordings were transcribed
    failures: list[Failure] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)  # names of damaged recordings
    unheard: list[str] = field(default_factory=list)  # of recordings without text, and who heard nothing
    stop_reason: str = ""  # why the run ended before its end
    stop_status: int = SUCCESS

    @property
    def exit_status(self) -> int:
        return self.stop_status or (SOME_FAILED if self.failures else SUCCESS)

    def show(self, quiet: bool) -> None:
        for name in self.cut_short:
            say(f"warning: {name}: damaged or cut short; what could be read is transcribed")
        for unheard in self.unheard:
            say(f"warning: {unheard}")
        for failure in self.failures:
            say(f"failed: {failure.name}: {failure.reason}")
        if self.stop_reason:
            say(f"stopped: {self.stop_reason}")
        if not quiet and (self.num_inputs > 1 or self.num_skipped or self.exit_status):
            say(self.numbers())

    def numbers(self) -> str:
        num_left = self.num_inputs - self.num_transcribed - self.num_skipped - len(self.failures)
        counts = {
            "transcribed": self.num_transcribed,
            "skipped": self.num_skipped,
            "failed": len(self.failures),
            "not begun or not finished": num_left,
        }
        counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing to do"
        return f"{counted}; {speed_of(self.audio_s, self.elapsed_s)}" if self.num_transcribed else counted


def say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
