"""Run another program's download in a process of its own, and watch what arrives in its folder.

The process ends when nothing arrives any more, whatever its own patience. Progress is a bar on a terminal,
else log lines. Blocks: never call it on an event loop.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from asr_server.errors import NotFetched

logger = logging.getLogger(__name__)

ANSWER_LIMIT_S: Final = 10.0  # before the first byte: how long a start waits for a host that is out of reach
SILENCE_LIMIT_S: Final = 30.0  # without a further byte: an index may have to fetch the package first
_LOOK_EVERY_S: Final = 0.1
_SECONDS_BETWEEN_LINES: Final = 10.0  # of progress in the log
_MAX_REASON_LETTERS: Final = 300


def run_watched(
    command: Sequence[str], folder: Path, what: str, num_bytes: int, environment: Mapping[str, str]
) -> str:
    """Return what the command prints; it downloads into `folder`.

    Args:
        num_bytes: expected size; 0: unknown.
    Raises:
        NotFetched: nothing arrived for too long, or the command failed; with the last line of its errors.
    """
    with (
        _progress(what, num_bytes) as show,
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            output, errors = _watch(process, folder, show)
        finally:
            process.kill()  # also at Ctrl-C; a no-op once it has ended
    if process.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        raise NotFetched((lines or [f"exited with status {process.returncode}"])[-1][:_MAX_REASON_LETTERS])
    return output


def _watch(process: subprocess.Popen[str], folder: Path, show: Callable[[int], None]) -> tuple[str, str]:
    at_first = arrived = bytes_in(folder)
    changed_s = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_LOOK_EVERY_S)
        if (latest := bytes_in(folder)) != arrived:
            arrived, changed_s = latest, time.monotonic()
            show(arrived)
        limit_s = ANSWER_LIMIT_S if arrived == at_first else SILENCE_LIMIT_S
        if time.monotonic() - changed_s > limit_s:
            raise NotFetched(f"no answer within {limit_s:g} s")


def bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that go meanwhile
        for name in names:
            with suppress(OSError):  # renamed meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def has_sum(path: Path, expected: str) -> bool:
    """Return whether the file has this sha256, or git's own sum, which the hub states for small files."""
    git_blob = b"blob %d\0" % path.stat().st_size
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(git_blob)  # nosec B324
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == expected


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    if sys.stderr.isatty() and not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=num_bytes or None)
            yield lambda done: bar.update(task, completed=done)
        return
    logger.info("fetching %s%s", what, f", {_in_mb(num_bytes)}" if num_bytes else "")
    next_line_s = time.monotonic() + _SECONDS_BETWEEN_LINES

    def log(done: int) -> None:
        nonlocal next_line_s
        if time.monotonic() >= next_line_s:
            next_line_s = time.monotonic() + _SECONDS_BETWEEN_LINES
            logger.info("%s: %s of %s", what, _in_mb(done), _in_mb(num_bytes) if num_bytes else "unknown")

    yield log


def _in_mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
