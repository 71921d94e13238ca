"""Wait for a condition, in a test with an event loop or without one."""

import asyncio
import time
from collections.abc import Callable

import psutil

LIMIT_S = 250.0  # under pytest's own; it ends what is broken and measures nothing


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S, pause_s: float = 0.001) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(pause_s)


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S, pause_s: float = 0.005) -> None:
    """Sleep in short steps until the condition holds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        time.sleep(pause_s)


def is_alive(process: psutil.Process) -> bool:
    """A process that has ended, and whom nobody has asked about yet, is not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
