"""Logs what the C libraries of decoding print to standard error, each line marked as a library's.

Runs in a thread of the API process. Used by `decoders.py`; touches no stderr of Python's and no file.

libmpg123, which is part of libsndfile, prints a line or two for each damage, but not its name. The decoder
itself tells whether a file is damaged; so these lines are for `--log-level debug`.
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
    """From now on the lines that C code of this process prints to its `stderr` are logged. Python's own is
    left alone, and so is file descriptor 2, to which a crash is reported.

    The pipe does not wait for its reader: lines that do not fit are lost. Does nothing where the C library
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
