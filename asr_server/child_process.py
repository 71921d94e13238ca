"""What replicas, the forkserver and decode processes have in common: environment and signals."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
from typing import Final

_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl's PR_SET_PDEATHSIG
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def child_environment() -> dict[str, str]:
    """This process's environment without what looks like a secret: a child that parses what strangers send
    could be made to tell it.
    """
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name)}


def leave_stopping_to_the_parent() -> None:
    """Ignores the signals that stop a server, in this process and in those it forks.

    Ctrl-C, systemd and some containers signal every process at once. The server then still needs its children
    to finish what is in flight; they end when it closes its end of their pipe or socket, or is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with_the_parent() -> None:
    """Ends this process when its parent ends, however that ends: the parent holds the pipe to this one's
    standard input open, and once it has been read so far, writes nothing more to it.
    """
    threading.Thread(target=_wait_for_the_parents_end, name="parent-watch", daemon=True).start()


def be_killed_with_the_parent() -> None:
    """Linux kills this process with its parent, even while it is stopped (SIGSTOP) and can watch nothing.

    The parent's thread that started this process has to live as long as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _wait_for_the_parents_end() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
