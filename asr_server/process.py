"""What a process of the server inherits, which signals it takes, and what ends it.

Used in every process, before its other modules: imports none of them.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_M_ARENA_MAX: Final = -8  # glibc's malloc.h
_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl's PR_SET_PDEATHSIG
_SET_NO_NEW_PRIVILEGES: Final = 38  # prctl's PR_SET_NO_NEW_PRIVS
_PACKAGE_PARENT: Final = Path(__file__).resolve().parents[1]
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def child_environment() -> dict[str, str]:
    """Return this process's environment for a child that runs a module of this package.

    It lacks what looks like a secret: a child that parses what strangers send could be made to reveal it.
    The child finds the package, and no Python file in the working directory.
    """
    public = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    return public | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(_import_folders())}


def _import_folders() -> Iterator[str]:
    """Yield the folder of a checkout first. An installed package is found without it, and site-packages must
    not come before Python's own modules. An empty entry would be the working directory.
    """
    if _PACKAGE_PARENT.name not in ("site-packages", "dist-packages"):
        yield str(_PACKAGE_PARENT)
    yield from filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def share_one_arena() -> None:
    """Lets all threads of this process, and of each that it starts, allocate from one arena of glibc's.

    With arenas of their own, which glibc gives to up to eight threads a core, what one thread has freed lies
    idle while another asks the kernel for more: a replica that decodes and encodes needed 50 MB more, in the
    same time. MALLOC_ARENA_MAX in the environment wins. Elsewhere than on glibc nothing happens.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    os.environ["MALLOC_ARENA_MAX"] = "1"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform.startswith("linux"):
        mallopt(_M_ARENA_MAX, 1)


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


def gain_no_privileges() -> None:
    """Keep this process and its children from more rights by running a setuid program (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _wait_for_the_parents_end() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
