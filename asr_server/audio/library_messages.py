"""Log what C libraries print to standard error, marked as a library's.

libmpg123 prints each damage without its name; the decoder itself reports damaged files, so these lines
are for `--log-level debug`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import threading
from functools import cache

logger = logging.getLogger(__name__)


@cache
def log_messages_of_libraries() -> None:
    """Log lines that C code prints to `stderr` from now on.

    Python's stderr and descriptor 2 stay as they are. Needs glibc, where `stderr` can be set (its manual,
    "Standard Streams").
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    libc.fdopen.restype = ctypes.c_void_p
    file = libc.fdopen(writing, b"w")
    libc.setlinebuf(ctypes.c_void_p(file))
    ctypes.c_void_p.in_dll(libc, "stderr").value = file
    threading.Thread(target=_log_lines, args=(reading,), name="asr-library-messages", daemon=True).start()


def _log_lines(descriptor: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines, contextlib.suppress(OSError):
        for line in lines:
            logger.debug("a library that decodes says: %s", line.rstrip())
