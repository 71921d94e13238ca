"""Messages to frames and back: msgpack, with samples beside it. No pickle.

Samples lie in shared memory or, without room there, in a frame behind the message. The reader does not copy.
Knows no sockets.

Shared memory is unnamed (memfd): it vanishes with the two processes and needs no /dev/shm. The writer copies
samples into slots; the reader uses them in place and reports when they are dropped. The lowest free slot is
taken, so few pages are touched; memory of slots beyond `KEPT_SLOTS` goes back to the system.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server.core import Samples

SAMPLES: Final = 1  # msgpack's extension type for the samples of a message

Bytes = npt.NDArray[np.uint8]
Frame = bytes | memoryview

logger = logging.getLogger(__name__)


class _Place(msgspec.Struct, array_like=True):
    num_bytes: int
    slot: int | None = None  # of the shared memory; None: the samples are the frame behind the message


def encode(message: Any, shared: SharedMemoryWriter | None = None) -> list[Frame]:
    """Return the message as a frame, and one that aliases samples for which there is no shared memory."""
    samples: list[Frame] = []

    def write(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()  # a plain number
        assert isinstance(value, np.ndarray)
        assert value.dtype == np.float32
        content = np.ascontiguousarray(value).view(np.uint8)
        slot = shared.write(content) if shared is not None else None
        if slot is None:
            samples.append(content.data)
        return msgspec.msgpack.Ext(SAMPLES, msgspec.msgpack.encode(_Place(content.nbytes, slot)))

    return [msgspec.msgpack.encode(message, enc_hook=write), *samples]


def decode(frames: Sequence[Frame], message_type: Any, shared: SharedMemoryReader | None = None) -> Any:
    """Return the message; its samples are a read-only view."""

    def read(code: int, data: memoryview) -> Samples:
        place = msgspec.msgpack.decode(data, type=_Place)
        if place.slot is None:
            return np.frombuffer(frames[1], np.float32)
        assert shared is not None
        # A buffer made of it would refer to the memory alone, which is used again when this array is gone.
        return shared.read(place.slot, place.num_bytes).view(np.float32)

    return msgspec.msgpack.decode(
        frames[0], type=message_type, ext_hook=read, dec_hook=lambda _, value: value
    )


# -- Shared memory -------------------------------------------------------------------------------------------

SLOT_BYTES: Final = 2 << 20  # whole pages for a window of 30 s as float32
NUM_SLOTS: Final = 512  # address space; memory is taken only where something was written
KEPT_SLOTS: Final = 128

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


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
