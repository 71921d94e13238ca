"""Holds the bytes of an upload: in memory while they are few, beyond that in an unlinked file.

Filled by `form.py`; handed to a `Recording` by `response.py`.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import BinaryIO, Final

from asr_server.config import MIB, naming
from asr_server.errors import UploadTooLarge

MEMORY_BYTES: Final = 8 * MIB
WRITE_BYTES: Final = MIB  # gathered before a thread is asked to write them


class Upload:
    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._held: list[bytes] = []
        self._num_held = 0
        self._file: BinaryIO | None = None

    def add(self, data: bytes) -> None:
        """Raises UploadTooLarge as soon as the limit is passed."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._held.append(data)
        self._num_held += len(data)

    async def spill_to_disk(self) -> None:
        """Moves to the file what is too much for memory, in a thread."""
        if self._num_held >= (MEMORY_BYTES if self._file is None else WRITE_BYTES):
            await asyncio.to_thread(self._write)

    async def source(self) -> BinaryIO | bytes:
        """The whole of it. Valid until `close`."""
        if self._file is None:
            whole = b"".join(self._held)
            self._held = [whole]  # not twice in memory
            return whole
        await asyncio.to_thread(self._write)
        return self._file

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._file.writelines(self._held)
        self._file.flush()
        self._held.clear()
        self._num_held = 0

    def close(self) -> None:
        self._held.clear()
        if self._file is not None:
            self._file.close()


def too_large(max_bytes: int) -> UploadTooLarge:
    return UploadTooLarge(f"The upload is larger than {max_bytes} bytes: {naming('max_upload_bytes')}.")
