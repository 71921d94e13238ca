"""Holds the bytes of an upload, once: in a file in memory while they are few, beyond that in one on disk.

Neither file has a name. Filled by `form.py`; handed to a `Recording` by `response.py`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from asr_server.audio.source import memory_file
from asr_server.config import MIB, naming
from asr_server.errors import StorageUnavailable, UploadTooLarge

MEMORY_BYTES: Final = 8 * MIB  # of one upload
WRITE_BYTES: Final = MIB // 4  # gathered before a thread is asked to write them to disk

logger = logging.getLogger(__name__)


class UploadMemory:
    """Counts the bytes that all uploads together hold in memory."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self._max_bytes


class Upload:
    """Every method but `close` raises StorageUnavailable where there is no room, or no temporary folder."""

    def __init__(self, max_bytes: int, memory: UploadMemory) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._memory = memory
        self._num_in_memory = 0
        self._file: BinaryIO | None = None
        self._is_on_disk = False
        self._unwritten = bytearray()  # on their way to the disk

    def add(self, data: bytes) -> None:
        """Raises UploadTooLarge as soon as the limit is passed."""
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
        """Moves to the disk, in a thread, what is too much for memory: of this upload, or of all of them."""
        limit = WRITE_BYTES if self._is_on_disk else MEMORY_BYTES
        if self._num_in_memory and (self._num_in_memory >= limit or self._memory.is_full):
            await _in_thread(self._append if self._is_on_disk else self._move)
            self._count_memory(-self._num_in_memory)

    async def source(self) -> BinaryIO:
        """The whole of it. Valid until `close`."""
        if self._is_on_disk:
            await _in_thread(self._append)
            self._count_memory(-self._num_in_memory)
        assert self._file is not None
        return self._file

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
        self._memory.num_bytes += num_bytes

    def close(self) -> None:
        """May be called again."""
        self._unwritten.clear()
        self._count_memory(-self._num_in_memory)
        if self._file is not None:
            with _storing(quietly=True):  # closing writes what is still in its buffer
                self._file.close()


async def _in_thread(function: Callable[[], None]) -> None:
    with _storing():
        await asyncio.to_thread(function)


@contextmanager
def _storing(quietly: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if quietly:
            return
        logger.error("an upload cannot be stored: %s", error)
        raise StorageUnavailable("The server has no room for the upload.") from error


def too_large(max_bytes: int) -> UploadTooLarge:
    return UploadTooLarge(f"The upload is larger than {max_bytes} bytes: {naming('max_upload_bytes')}.")
