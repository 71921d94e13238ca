"""Where a request's chunks come from: a recording that is decoded in the pool, or samples at hand."""

from __future__ import annotations

from typing import Protocol

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import DecodeSlice, Recording
from asr_server.core import Chunk


class Source(Protocol):
    @property
    def duration_s(self) -> float:
        """Seconds given out so far; exact once finished."""
        ...

    @property
    def settled_s(self) -> float:
        """Every chunk that begins before has been given out, whatever its channel."""
        ...

    @property
    def truncated(self) -> bool: ...

    async def next_slice(self, max_chunks: int) -> DecodeSlice: ...

    def close(self) -> None: ...


class RecordingSource:
    def __init__(self, pool: PreprocessPool, recording: Recording) -> None:
        self._pool, self._recording = pool, recording

    @property
    def duration_s(self) -> float:
        return self._recording.duration_s

    @property
    def settled_s(self) -> float:
        return self._recording.settled_s

    @property
    def truncated(self) -> bool:
        return self._recording.truncated

    async def next_slice(self, max_chunks: int) -> DecodeSlice:
        return await self._pool.decode_slice(self._recording, max_chunks)

    def close(self) -> None:
        self._recording.close()


class ChunkSource:
    """One chunk and no more."""

    truncated = False

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.duration_s = self.settled_s = chunk.duration_s

    async def next_slice(self, max_chunks: int) -> DecodeSlice:
        return DecodeSlice([self._chunk], finished=True)

    def close(self) -> None:
        pass
