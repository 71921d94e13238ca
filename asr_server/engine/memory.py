"""Keeps freed memory in the process instead of giving it back to the kernel. Called once by `Engine.load`."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # glibc's malloc.h
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Tells glibc not to give freed blocks back to the kernel in this process.

    Else every large intermediate result is mapped anew, and the page faults of a 5 MB result cost more than
    the matrix product that fills it (2.5 times on the processor measured, docs/engine.md). Elsewhere than on
    glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
