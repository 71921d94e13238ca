"""What replicas, the forkserver and decode processes have in common: environment and signals."""

from __future__ import annotations

import os
import re
import signal
from typing import Final

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
