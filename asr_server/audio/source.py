"""Whatever holds the bytes, as a file descriptor: the decoders' libraries then read without Python."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

Source = Path | BinaryIO | bytes
_COPY_BYTES = 1 << 20


def open_source(source: Source) -> int:
    """A descriptor of one's own on a seekable file, with its own position where the system allows.

    Raises:
        OSError: the path cannot be opened.
    """
    if isinstance(source, str | os.PathLike):
        return os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    if isinstance(source, bytes | bytearray | memoryview):
        return _in_memory(memoryview(source))
    fd = _regular_fd(source)
    return _reopen(fd) if fd is not None else _copy(source)


def _regular_fd(source: BinaryIO) -> int | None:
    if (
        getattr(source, "_rolled", True) is False
    ):  # asking a spooled file for its descriptor writes it to disk
        return None
    try:
        fd = source.fileno()
    except (OSError, AttributeError):
        return None
    if source.writable():
        source.flush()
    return fd if stat.S_ISREG(os.fstat(fd).st_mode) else None


def _reopen(fd: int) -> int:
    """The same file with a position of its own; works for unlinked files too."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)


def _copy(source: BinaryIO) -> int:
    fd = _scratch()
    if source.seekable():
        source.seek(0)
    while block := source.read(_COPY_BYTES):
        _write(fd, memoryview(block))
    return fd


def _in_memory(data: memoryview) -> int:
    fd = _scratch()
    _write(fd, data)
    return fd


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _scratch() -> int:
    """A nameless file, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("asr-upload", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
