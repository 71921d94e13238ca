"""Has what all downloads share: the folders in the cache, the progress shown, and the check of a file's sum.

Models lie in the Hugging Face cache and in this server's own beside it; HF_HOME moves both. In the own folder
`models/NAME@REVISION` has what was fetched, `readings/` what `adopt.py` writes. Progress is a bar on a
terminal, else lines in the log. Runs in the first process, or in a replica on another host. Used by the rest
of `checkpoint` and by `cli/models.py`; fetches nothing itself.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, Final, Self


def hub_cache() -> Path:
    """The folder that huggingface_hub, transformers and faster-whisper keep models in."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(given) if given else _home() / "hub"


def own_cache() -> Path:
    """The folder in which this server keeps models that it has fetched. It need not be there yet."""
    return _home() / "asr-server"


def writable(folder: str) -> Path:
    """The subfolder of the own cache with that name, made if need be.

    Where nothing can be written there (a read-only container, say), one that is gone when the process ends.
    """
    path = own_cache() / folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return _temporary()


@cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="asr-server-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _home() -> Path:
    """Finds HF_HOME as huggingface_hub does, whose import would take longer than the rest of a start."""
    given = os.environ.get("HF_HOME")
    return _expanded(given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES: Final = 10.0


class DownloadProgress:
    """Tells how far the download of one model is; to be used in a `with` statement."""

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
            size = f", {_in_mb(self._num_bytes)}" if self._num_bytes else ""
            logger.info("fetching %s%s", self._what, size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def reached(self, num_bytes: int) -> None:
        """Sets how many bytes have arrived."""
        self._done = num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes)
        elif time.monotonic() - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = time.monotonic()
            logger.info("%s: %s of %s", self._what, _in_mb(self._done), _in_mb(self._num_bytes))

    def add(self, num_bytes: int) -> None:
        self.reached(self._done + num_bytes)


def _in_mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


_SHA256_DIGITS: Final = 64


def has_sum(path: Path, expected: str) -> bool:
    """Whether the file has this sum: sha256, or with 40 digits the one that git names a small file by."""
    is_sha256 = len(expected) == _SHA256_DIGITS
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == expected
