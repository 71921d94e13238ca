"""Gives what the C libraries of decoding print to standard error a name, and a line of the log each.

libmpg123, which libsndfile has within it, prints a line or two for each damage, but not who says so.
Whether a file is damaged the decoder tells by itself; so these lines are for `--log-level debug`. Used by
`decoders.py`.
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
    """From now on what C code of this process prints to its `stderr` is logged. Python's own is left alone,
    and so is file descriptor 2, to which a crash is reported.

    The pipe does not wait for its reader: what is too much for it is lost. Does nothing where the C library
    is not glibc, whose `stderr` is a variable that may be set (its manual, "Standard Streams").
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
