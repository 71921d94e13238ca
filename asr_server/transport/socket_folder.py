"""A private folder for the sockets of one replica, of which anybody can tell whether its owner lives.

The owner holds a lock on the folder, which the system releases however the owner ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "asr-ipc-"


class SocketFolder:
    def __init__(self) -> None:
        """Raises OSError when the folder for temporary files is full or gone."""
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _lock(self.path)  # None: another server has just taken it for abandoned
        self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Removes what servers of this user that were killed have left behind."""
    for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, or removed by somebody else meanwhile
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """An open handle that holds the folder's lock; None when somebody else holds it or the folder is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():
            return handle
    except BlockingIOError:
        pass
    os.close(handle)
    return None
