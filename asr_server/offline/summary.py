"""Counts what became of the inputs, and tells it at the end on standard error.

Filled by `run.py` and `batch.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from asr_server.offline.inputs import Failure
from asr_server.offline.text import printable

SUCCESS, SOME_FAILED = 0, 1


@dataclass
class Summary:
    num_inputs: int = 0
    num_transcribed: int = 0
    num_skipped: int = 0
    failures: list[Failure] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)  # names of damaged recordings
    stop_reason: str = ""  # why the run ended before its end
    stop_status: int = SUCCESS

    def stop(self, reason: str, status: int) -> None:
        self.stop_reason, self.stop_status = reason, status

    @property
    def exit_status(self) -> int:
        return self.stop_status or (SOME_FAILED if self.failures else SUCCESS)

    def show(self, quiet: bool) -> None:
        """A line for each file that went wrong, and unless quiet one with the numbers."""
        for name in self.cut_short:
            _say(f"warning: {name}: damaged or cut short; what could be read is transcribed")
        for failure in self.failures:
            _say(f"failed: {failure.name}: {failure.reason}")
        if self.stop_reason:
            _say(f"stopped: {self.stop_reason}")
        if not quiet and (self.num_inputs > 1 or self.num_skipped or self.exit_status):
            _say(self._numbers())

    def _numbers(self) -> str:
        num_left = self.num_inputs - self.num_transcribed - self.num_skipped - len(self.failures)
        counts = {
            "transcribed": self.num_transcribed,
            "skipped": self.num_skipped,
            "failed": len(self.failures),
            "not begun or not finished": num_left,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing to do"


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
