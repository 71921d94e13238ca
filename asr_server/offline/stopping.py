"""How a call of `asr-server transcribe` is ended from outside. Used by `run.py` and `manifest/run.py`."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


def cancel_on_sigterm() -> None:
    """From now on TERM cancels the task that calls this."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
