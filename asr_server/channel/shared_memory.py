"""Unnamed memory that two processes share (memfd). It vanishes with them and needs no /dev/shm.

The writer copies arrays into slots; the reader uses them in place and reports when they are dropped. The
lowest free slot is taken, so few pages are touched; memory of slots beyond `KEPT_SLOTS` goes back to the
system. Knows no messages.
"""

import ctypes
import heapq
import logging
import mmap
import os
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

SLOT_BYTES: Final = 2 << 20  # whole pages for a window of 30 s as float32
NUM_SLOTS: Final = 512  # address space; memory is taken only where something was written
KEPT_SLOTS: Final = 128

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

Bytes = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)


class SharedMemoryWriter:
    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.fd = os.memfd_create("asr-server-arrays", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_slots * SLOT_BYTES)
        self._free = list(range(num_slots))  # a heap

    def write(self, content: Bytes) -> int | None:
        """Copy bytes in and return their slot, or None if there is no room.

        A mapping would end the process where the system has no memory left.
        """
        if len(content) > SLOT_BYTES or not self._free:
            return None
        slot = heapq.heappop(self._free)
        try:
            is_complete = os.pwrite(self.fd, content.data, slot * SLOT_BYTES) == len(content)
        except OSError:
            is_complete = False
        if is_complete:
            return slot
        self.release(slot)
        return None

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        if slot >= KEPT_SLOTS:
            fallocate = ctypes.CDLL(None).fallocate
            fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            fallocate(self.fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, slot * SLOT_BYTES, SLOT_BYTES)

    def close(self) -> None:
        """The memory vanishes when the reader closes too."""
        os.close(self.fd)


def create_shared_memory() -> SharedMemoryWriter | None:
    """Return None where the system has no memfd; arrays then go with their messages."""
    try:
        return SharedMemoryWriter()
    except (OSError, AttributeError) as error:
        logger.warning("no memory can be shared with replicas: %s", error)
        return None


class SharedMemoryReader:
    """The reading end. `take_released` lists the slots of dropped arrays."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._bytes = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), np.uint8)
        self._released: deque[int] = deque()

    def read(self, slot: int, num_bytes: int) -> Bytes:
        """Return a slot's first bytes, read-only, valid while a view exists."""
        content = self._bytes[slot * SLOT_BYTES :][:num_bytes].view(_Region)
        weakref.finalize(content, self._released.append, slot).atexit = False
        return content

    def take_released(self) -> list[int]:
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released


class _Region(np.ndarray[Any, Any]):
    """One array's bytes; a type of its own, so that views keep it alive, not the whole memory."""
