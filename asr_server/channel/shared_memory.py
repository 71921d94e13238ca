"""Unnamed memory that two processes share (memfd). It vanishes with them and needs no /dev/shm.

The writer copies arrays in; the reader uses them in place and reports when they are dropped. A header
with the length precedes each array. Freed memory is reused lowest first, so few pages are touched; memory
beyond `KEPT_BYTES` goes back to the system. Knows no messages. Loads torch only for a tensor.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import re
import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


TORCH: Final = "torch."  # begins the type's name where the array is a tensor: `torch.bfloat16`
# Object arrays hold addresses, and strings are not what is sent here.
_KINDS: Final = frozenset("biufc")
# What `dtype.str` is for these. numpy reads far more, some of it as Python, with errors of any kind.
_NAME: Final = re.compile(r"[<>|][biufc]\d{1,2}")

Bytes = npt.NDArray[np.uint8]


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def type_name(value: Any) -> str:
    """Return `<f4` for an array, `torch.bfloat16` for a tensor.

    Raises NotImplementedError if the type is not numeric.
    """
    if _is_tensor(value):
        return str(value.dtype)
    if value.dtype.kind not in _KINDS:
        raise NotImplementedError(f"arrays of {value.dtype} do not cross the wire")
    return str(value.dtype.str)


def as_bytes(value: Any) -> Bytes:
    if _is_tensor(value):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        viewed: Bytes = flat.view(torch.uint8).numpy()
        return viewed
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def from_bytes(content: Any, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any] | torch.Tensor:
    """Return the array or tensor on this memory. Raises ValueError if type, shape and content do not fit."""
    # An array is taken as it is: a buffer made of it would refer to the memory alone, which may be used again
    # as soon as the array itself is gone.
    data = content if isinstance(content, np.ndarray) else np.frombuffer(content, np.uint8)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"no shape: {shape}")
    dtype = _type_named(name)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {name} of shape {shape}")
    if isinstance(dtype, np.dtype):
        return data.view(dtype).reshape(shape)
    import torch

    if not len(data):
        return torch.empty(shape, dtype=dtype)
    # torch knows no read-only tensors and warns of them: what was received is copied for it, once.
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(dtype).view(shape)


def _type_named(name: str) -> np.dtype[Any] | torch.dtype:
    if _NAME.fullmatch(name):
        return np.dtype(name)
    if name.startswith(TORCH):
        import torch

        if isinstance(dtype := getattr(torch, name.removeprefix(TORCH), None), torch.dtype):
            return dtype
    raise ValueError(f"no type of numbers: {name!r}")


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


SIZE: Final = 1 << 30  # address space; memory is taken only where something was written
KEPT_BYTES: Final = 256 << 20
# The writer maps no more: to map a page takes twice as long as to have the system write it once, to write a
# page that is mapped takes a third of that.
MAPPED_BYTES: Final = 64 << 20
ALIGNMENT: Final = 4096  # whole pages, so that what is freed can be given back
HEADER_BYTES: Final = 64  # the length of the array, and what keeps the array aligned

logger = logging.getLogger(__name__)

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


class SharedMemoryWriter:
    def __init__(self, size: int = SIZE) -> None:
        self.fd = os.memfd_create("asr-server-arrays", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._bytes = np.frombuffer(mmap.mmap(self.fd, min(size, MAPPED_BYTES)), np.uint8)
        self._size = size
        self._used: dict[int, int] = {}  # offset: length, whole pages
        self._end = 0  # the file has all pages up to here, and none from here on

    @property
    def num_bytes_used(self) -> int:
        return sum(self._used.values())

    def write(self, value: Any) -> int | None:
        """Copy an array in and return its offset, or None if there is no room."""
        content = as_bytes(value)
        length = -(-(len(content) + HEADER_BYTES) // ALIGNMENT) * ALIGNMENT
        offset = self._allocate(length)
        if offset is None:
            return None
        header = len(content).to_bytes(HEADER_BYTES, "little")
        if offset + length <= min(self._end, len(self._bytes)):
            self._bytes[offset : offset + HEADER_BYTES] = np.frombuffer(header, np.uint8)
            self._bytes[offset + HEADER_BYTES :][: len(content)] = content
        elif not self._write_by_system(header, content, offset):
            self.release(offset)
            return None
        self._end = max(self._end, offset + length)
        return offset

    def _write_by_system(self, header: bytes, content: Bytes, offset: int) -> bool:
        """Return False if no memory is left, where the mapping would end the process.

        New pages are not cleared first: twice as fast as by the mapping.
        """
        try:
            return os.pwritev(self.fd, [header, content.data], offset) == HEADER_BYTES + len(content)
        except OSError:
            return False

    def release(self, offset: int) -> None:
        self._used.pop(offset, None)
        kept = max((KEPT_BYTES, *(offset + length for offset, length in self._used.items())))
        if self._end > kept:
            self._give_back(kept, self._end - kept)
            self._end = kept

    def close(self) -> None:
        """Free the memory at once; it vanishes when the reader closes too."""
        self._bytes = np.empty(0, np.uint8)
        os.close(self.fd)

    def _allocate(self, length: int) -> int | None:
        end = 0
        for offset, used in sorted(self._used.items()):
            if offset - end >= length:
                break
            end = offset + used
        if end + length > self._size:
            return None
        self._used[end] = length
        return end

    def _give_back(self, offset: int, length: int) -> None:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        fallocate(self.fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length)


def create_shared_memory() -> SharedMemoryWriter | None:
    """Return None where the system has no memfd; arrays then go with their messages."""
    try:
        return SharedMemoryWriter()
    except (OSError, AttributeError) as error:
        logger.warning("no memory can be shared with replicas: %s", error)
        return None


class SharedMemoryReader:
    """The reading end. `take_released` lists the dropped arrays."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._bytes = np.frombuffer(mmap.mmap(fd, self._size, prot=mmap.PROT_READ), np.uint8)
        self._released: deque[int] = deque()
        self._lock = threading.Lock()
        self._in_use: set[int] = set()

    def read(self, offset: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at `offset`, read-only, valid while a view exists.

        Raises ValueError if no array can be there, or one is in use.
        """
        with self._lock:
            if not 0 <= offset <= self._size - HEADER_BYTES or offset % ALIGNMENT or offset in self._in_use:
                raise ValueError(f"no array at {offset}")
            num_bytes = int(self._bytes[offset : offset + 8].view(np.uint64)[0])
            if num_bytes > self._size - offset - HEADER_BYTES:
                raise ValueError(f"the array at {offset} is longer than the memory")
            self._in_use.add(offset)
        content = self._bytes[offset + HEADER_BYTES :][:num_bytes].view(_Region)
        weakref.finalize(content, self._drop, offset).atexit = False
        return content

    def take_released(self) -> list[int]:
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released

    def _drop(self, offset: int) -> None:
        self._in_use.discard(offset)
        self._released.append(offset)


class _Region(np.ndarray[Any, Any]):
    """One array's bytes; a type of its own, so that views keep it alive, not the whole memory."""
