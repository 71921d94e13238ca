"""Gives freed memory back to the system while the server has nothing to do. Started by `app.py`.

The C library keeps what many connections needed at once: some 86 MB after 600 slow clients. It may not run
while requests are in flight, because other threads wait for the allocator meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asr_server.config import MIB

LOOK_EVERY_S: Final = 2.0
WORTH_BYTES: Final = 4 * MIB  # less growth than this is left alone
_STATM: Final = Path("/proc/self/statm")


async def release_memory_when_idle(is_idle: Callable[[], bool]) -> None:
    """Runs until cancelled; returns at once where the C library is not glibc or there is no /proc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not _STATM.exists():
        return
    least_bytes = resident_bytes()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if is_idle() and resident_bytes() > least_bytes + WORTH_BYTES:
            await asyncio.to_thread(trim, 0)  # some milliseconds
        least_bytes = min(least_bytes, resident_bytes())


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
