"""Hold uploads once, within bounds: few bytes in memory, more in the temporary folder.

Files are unnamed and written in threads. Decodes no audio.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from asr_server.audio.limits import TOO_MANY_FILES
from asr_server.audio.recording import memory_file
from asr_server.config import MIB, in_mebibytes, naming
from asr_server.errors import StorageUnavailable, UploadTooLarge

MEMORY_BYTES: Final = 8 * MIB  # of one upload
WRITE_BYTES: Final = MIB // 4  # gathered before a thread is asked to write them to disk
FREE_SHARE: Final = 20  # a twentieth of the temporary folder's disk is left free

logger = logging.getLogger(__name__)


class UploadStore:
    """The bytes of all uploads, in memory and on disk."""

    def __init__(self, max_memory_bytes: int) -> None:
        self.memory_bytes = 0
        self.disk_bytes = 0
        self._max_memory_bytes = max_memory_bytes

    @property
    def is_memory_full(self) -> bool:
        return self.memory_bytes >= self._max_memory_bytes

    @property
    def largest_bytes(self) -> int:
        """Return the size that an upload alone may have. Raises OSError."""
        return max(MEMORY_BYTES, _free_bytes() + self.disk_bytes)

    def take_disk(self, num_bytes: int) -> None:
        """Raises OSError, StorageUnavailable."""
        if num_bytes > _free_bytes():
            raise StorageUnavailable("The temporary folder is full of other uploads. Try again later.")
        self.disk_bytes += num_bytes


def _free_bytes() -> int:
    disk = shutil.disk_usage(tempfile.gettempdir())
    return max(0, disk.free - disk.total // FREE_SHARE)


class Upload:
    """Every method but `close` raises StorageUnavailable without room or folder."""

    def __init__(self, max_bytes: int, store: UploadStore) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._store = store
        self._num_in_memory = 0
        self._num_on_disk = 0
        self._file: BinaryIO | None = None
        self._is_on_disk = False
        self._unwritten = bytearray()  # on their way to the disk
        self._writing: asyncio.Future[None] | None = None  # in a thread

    def require_room(self, num_bytes: int) -> None:
        """Raises UploadTooLarge for a size that the server can never take."""
        if num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        if num_bytes > MEMORY_BYTES:
            with _storing():
                largest_bytes = self._store.largest_bytes
            if num_bytes > largest_bytes:
                raise _too_large_for_disk(largest_bytes)

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
        """Move to the disk, in a thread, if memory exceeds its limits. Raises UploadTooLarge."""
        limit = WRITE_BYTES if self._is_on_disk else MEMORY_BYTES
        if self._num_in_memory and (self._num_in_memory >= limit or self._store.is_memory_full):
            await self._to_disk(self._append if self._is_on_disk else self._move)

    async def source(self) -> BinaryIO:
        if self._is_on_disk:
            await self._to_disk(self._append)
        assert self._file is not None
        return self._file

    async def _to_disk(self, write: Callable[[], None]) -> None:
        self.require_room(self.num_bytes)
        num_bytes = self._num_in_memory
        with _storing():
            self._store.take_disk(num_bytes)
            self._num_on_disk += num_bytes
            self._writing = asyncio.get_running_loop().run_in_executor(None, write)
            await asyncio.shield(self._writing)  # a client that leaves does not end the thread
        self._count_memory(-num_bytes)

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
        """Give everything back, behind the thread that still writes."""
        if self._writing is not None and not self._writing.done():
            self._writing.add_done_callback(lambda _: self._release())
        else:
            self._release()

    def _release(self) -> None:
        self._unwritten.clear()
        self._count_memory(-self._num_in_memory)
        self._store.disk_bytes -= self._num_on_disk
        self._num_on_disk = 0
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


def _too_large_for_disk(largest_bytes: int) -> UploadTooLarge:
    return UploadTooLarge(
        f"The file is larger than {in_mebibytes(largest_bytes)}, the most that the server's temporary folder "
        f"(TMPDIR) has room for. A compressed format, such as mp3 or opus, is smaller."
    )
