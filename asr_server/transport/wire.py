"""Messages to frames and back: msgpack, with arrays beside it. No pickle.

An array below `INLINE_BYTES` is part of the message; a larger one lies in shared memory or, without room
there, in its own frame. The threshold and frames follow vLLM's tensor transport (pull request 16432). The
reader does not copy. Knows no sockets; imports torch only for a tensor.

Shared memory is unnamed (memfd): it vanishes with the two processes and needs no /dev/shm. The writer copies
arrays into slots; the reader uses them in place and reports when they are dropped. The lowest free slot is
taken, so few pages are touched.
"""

from __future__ import annotations

import heapq
import logging
import math
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

INLINE_BYTES: Final = 256
ARRAY: Final = 1  # msgpack's extension type for the arrays of a message
TORCH: Final = "torch."  # begins the type's name where the array is a tensor: `torch.bfloat16`
_KINDS: Final = frozenset("biufc")  # object arrays hold addresses

Bytes = npt.NDArray[np.uint8]
Frame = bytes | memoryview

logger = logging.getLogger(__name__)


class _Array(msgspec.Struct, array_like=True):
    type_name: str  # `float32`; of a tensor `torch.bfloat16`
    shape: tuple[int, ...]
    inline: bytes | None = None
    frame: int | None = None
    slot: int | None = None  # of the shared memory


def encode(message: Any, shared: SharedMemoryWriter | None = None) -> list[Frame]:
    """Return the header frame, and a frame for each large array, which aliases its memory."""
    frames: list[Frame] = [b""]

    def write(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()  # a plain number
        content, header = _as_bytes(value), _Array(str(value.dtype), tuple(value.shape))
        if len(content) < INLINE_BYTES:
            header.inline = content.tobytes()
        elif shared is not None and (slot := shared.write(content)) is not None:
            header.slot = slot
        else:
            frames.append(content.data)
            header.frame = len(frames) - 1
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(header))

    frames[0] = msgspec.msgpack.encode(message, enc_hook=write)
    return frames


def decode(frames: Sequence[Frame], message_type: Any, shared: SharedMemoryReader | None = None) -> Any:
    """Return the message; its arrays are read-only views."""

    def read(code: int, data: memoryview) -> Any:
        header = msgspec.msgpack.decode(data, type=_Array)
        dtype = _type_named(header.type_name)
        # An array is taken as it is: a buffer made of it would refer to the memory alone, which may be used
        # again as soon as the array itself is gone.
        match header:
            case _Array(slot=int(slot)) if shared is not None:
                content = shared.read(slot, math.prod(header.shape) * dtype.itemsize)
            case _Array(frame=int(number)):
                content = np.frombuffer(frames[number], np.uint8)
            case _:
                content = np.frombuffer(header.inline or b"", np.uint8)
        return _from_bytes(content, dtype, header.shape)

    return msgspec.msgpack.decode(
        frames[0], type=message_type, ext_hook=read, dec_hook=lambda _, value: value
    )


# -- Arrays and tensors --------------------------------------------------------------------------------------


def _as_bytes(value: Any) -> Bytes:
    """Raises NotImplementedError for what is no array of numbers."""
    torch = sys.modules.get("torch")  # which whoever has a tensor has imported
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        viewed: Bytes = flat.view(torch.uint8).numpy()
        return viewed
    if not isinstance(value, np.ndarray) or value.dtype.kind not in _KINDS:
        raise NotImplementedError(f"{getattr(value, 'dtype', type(value))} does not cross the wire")
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _type_named(name: str) -> np.dtype[Any] | torch.dtype:
    if not name.startswith(TORCH):
        return np.dtype(name)
    import torch

    dtype: torch.dtype = getattr(torch, name.removeprefix(TORCH))
    return dtype


def _from_bytes(content: Bytes, dtype: np.dtype[Any] | torch.dtype, shape: tuple[int, ...]) -> Any:
    if isinstance(dtype, np.dtype):
        return content.view(dtype).reshape(shape)
    import torch

    if not len(content):
        return torch.empty(shape, dtype=dtype)
    # torch knows no read-only tensors and warns of them: what was received is copied for it, once.
    own = content if content.flags.writeable else content.copy()
    return torch.from_numpy(own).view(dtype).view(shape)


# -- Shared memory -------------------------------------------------------------------------------------------

SLOT_BYTES: Final = 2 << 20  # whole pages for a window of 30 s as float32
NUM_SLOTS: Final = 128  # more than a replica's chunks that wait or are encoded; memory only where written


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

    def release(self, *slots: int) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

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
