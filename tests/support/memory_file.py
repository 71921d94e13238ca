import io

from asr_server.audio.recording import memory_file


class MemoryFile(io.BytesIO):
    """A file in memory that the system knows, as an upload is. Closed with its last reference."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._file = memory_file()
        self._file.write(content)
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()
