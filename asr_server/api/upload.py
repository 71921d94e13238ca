"""Hold uploads once, within bounds: few bytes in memory, more in the temporary folder.

Files are unnamed and written in threads. Decodes no audio.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, Protocol

from asr_server.audio.limits import TOO_MANY_FILES
from asr_server.audio.recording import memory_file
from asr_server.config import MIB, in_mebibytes, naming
from asr_server.errors import StorageUnavailable, UploadTooLarge

MEMORY_BYTES: Final = 8 * MIB  # of one upload
WRITE_BYTES: Final = MIB // 4  # gathered before a thread is asked to write them to disk
LEAST_FREE_SHARE: Final = 0.01  # of the disk's share: a full one asks 100 times the least rate of uploads

logger = logging.getLogger(__name__)


class Sender(Protocol):
    @property
    def bytes_per_s(self) -> float: ...

    def make_room(self, full: str) -> None: ...


class UploadStore:
    """The bytes of all uploads, in memory and on disk.

    Args:
        max_disk_bytes: 0 means half of the temporary folder's free space.
    """

    def __init__(self, max_memory_bytes: int, max_disk_bytes: int = 0) -> None:
        self.memory_bytes = 0
        self.disk_bytes = 0
        self._max_memory_bytes, self._max_disk_bytes = max_memory_bytes, max_disk_bytes
        self.arriving: set[Upload] = set()  # those on the disk that are not complete
        self._disk_limit_bytes = math.inf  # when it was last looked at

    @property
    def is_memory_full(self) -> bool:
        return self.memory_bytes >= self._max_memory_bytes

    @property
    def rate_factor(self) -> float:
        """Return the factor of the least rate, which grows as the disk fills."""
        free_share = 1 - self.disk_bytes / self._disk_limit_bytes
        return 1 / max(free_share, LEAST_FREE_SHARE)

    def take_disk(self, upload: Upload, num_bytes: int) -> None:
        """Make room by closing slower uploads, slowest first. Raises StorageUnavailable."""
        limit = self._disk_limit_bytes = self._disk_limit()
        while self.disk_bytes + num_bytes > limit:
            slowest = min(self.arriving, key=lambda other: other.bytes_per_s, default=upload)
            if slowest.bytes_per_s >= upload.bytes_per_s:
                raise StorageUnavailable(f"{_full(limit)}. Try again later.")
            slowest.make_room(_full(limit))
        self.disk_bytes += num_bytes

    def _disk_limit(self) -> int:
        free = shutil.disk_usage(tempfile.gettempdir()).free
        return self._max_disk_bytes or max(1, (free + self.disk_bytes) // 2)


def _full(limit_bytes: int) -> str:
    setting = naming("max_upload_disk_bytes")
    return f"Uploads hold all of their {in_mebibytes(limit_bytes)} in the temporary folder: {setting}"


class Upload:
    """Every method but `close` raises StorageUnavailable without room or folder."""

    def __init__(self, max_bytes: int, store: UploadStore, sender: Sender | None = None) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._store = store
        self._sender = sender
        self._num_in_memory = 0
        self._num_on_disk = 0
        self._has_given_up = False
        self._file: BinaryIO | None = None
        self._is_on_disk = False
        self._unwritten = bytearray()  # on their way to the disk

    @property
    def bytes_per_s(self) -> float:
        return math.inf if self._sender is None else self._sender.bytes_per_s

    def add(self, data: bytes | memoryview) -> None:
        """Raises UploadTooLarge at the limit."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._count_memory(len(data))
        if self._is_on_disk:
            self._unwritten += data
            return
        with _storing():
            if self._file is None:
                self._file = memory_file()
            self._file.write(data)

    async def spill_to_disk(self) -> None:
        """Move to the disk, in a thread, if memory exceeds its limits."""
        limit = WRITE_BYTES if self._is_on_disk else MEMORY_BYTES
        if self._has_given_up or not self._num_in_memory:
            return
        if self._num_in_memory >= limit or self._store.is_memory_full:
            await self._to_disk(self._append if self._is_on_disk else self._move)

    async def source(self) -> BinaryIO:
        if self._is_on_disk:
            await self._to_disk(self._append)
        self._store.arriving.discard(self)
        assert self._file is not None
        return self._file

    async def _to_disk(self, write: Callable[[], None]) -> None:
        num_bytes = self._num_in_memory
        with _storing():
            self._store.take_disk(self, num_bytes)
            self._num_on_disk += num_bytes
            self._store.arriving.add(self)
            await asyncio.to_thread(write)
        self._count_memory(-num_bytes)

    def make_room(self, full: str) -> None:
        assert self._sender is not None
        self._give_up_disk()
        self._sender.make_room(full)

    def _give_up_disk(self) -> None:
        self._has_given_up = True
        self._store.disk_bytes -= self._num_on_disk
        self._num_on_disk = 0
        self._store.arriving.discard(self)

    def _move(self) -> None:
        assert self._file is not None
        on_disk = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._file.seek(0)
            shutil.copyfileobj(self._file, on_disk)
            on_disk.flush()
        except BaseException:
            on_disk.close()
            raise
        self._file.close()
        self._file, self._is_on_disk = on_disk, True

    def _append(self) -> None:
        assert self._file is not None
        self._file.write(self._unwritten)
        self._file.flush()
        self._unwritten.clear()

    def _count_memory(self, num_bytes: int) -> None:
        self._num_in_memory += num_bytes
        self._store.memory_bytes += num_bytes

    def close(self) -> None:
        self._unwritten.clear()
        self._count_memory(-self._num_in_memory)
        self._give_up_disk()
        if self._file is not None:
            with _storing(quietly=True):  # closing writes what is still in its buffer
                self._file.close()


@contextmanager
def _storing(quietly: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if quietly:
            return
        logger.error("an upload cannot be stored: %s", error)
        is_out_of_files = error.errno in (errno.EMFILE, errno.ENFILE)
        reason = TOO_MANY_FILES if is_out_of_files else "The server has no room for the upload."
        raise StorageUnavailable(reason) from error


def too_large(max_bytes: int) -> UploadTooLarge:
    return UploadTooLarge(
        f"The file is larger than {in_mebibytes(max_bytes)}, the most that this server takes "
        f"({naming('max_upload_bytes')}). A compressed format, such as mp3 or opus, is smaller."
    )
