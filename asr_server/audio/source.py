"""Gives a path, a file or bytes as a file descriptor, from which decoders read without calling Python."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

Source = Path | BinaryIO | bytes
_COPY_BYTES = 1 << 20


def open_source(source: Source) -> io.FileIO:
    """A seekable file of one's own, with its own position where the system allows.

    Raises:
        OSError: the path cannot be opened.
    """
    if isinstance(source, str | os.PathLike):
        return io.FileIO(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return _filled([source])
    fd = _regular_fd(source)
    if fd is not None:
        return _reopened(fd)
    if source.seekable():
        source.seek(0)
    return _filled(iter(lambda: source.read(_COPY_BYTES), b""))


def _regular_fd(source: BinaryIO) -> int | None:
    # Asking a spooled file for its descriptor writes it to disk.
    if getattr(source, "_rolled", True) is False:
        return None
    try:
        fd = source.fileno()
    except (OSError, AttributeError):
        return None
    if source.writable():
        source.flush()
    return fd if stat.S_ISREG(os.fstat(fd).st_mode) else None


def _reopened(fd: int) -> io.FileIO:
    """The same file with a position of its own; works for unlinked files too."""
    try:
        return io.FileIO(f"/proc/self/fd/{fd}")
    except OSError:
        return io.FileIO(os.dup(fd))


def _filled(blocks: Iterable[bytes | bytearray | memoryview]) -> io.FileIO:
    with memory_file() as file:
        for block in blocks:
            file.write(block)
        file.flush()
        return _reopened(file.fileno())


def memory_file() -> BinaryIO:
    """A nameless file, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("asr-upload", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()
