"""What is final of a chunk while it is still being read, for a stream that must not take anything back.

Used by `session.py`. A replica reports the segments of a part as they are closed (`core.EarlyResult`),
once they are plausible by themselves. They stand, whatever comes of the rest: where the whole part fails the
temperature ladder or is judged silence, or another replica takes over and reads differently, the part ends
with them, and what follows is read again as the next part, like any tail that was left unread.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from asr_server.core import ChunkResult, DecodingOptions, TranscriptDelta
from asr_server.transcription.assembly import DecodedPart, is_silence

NOTHING: Final = TranscriptDelta("", (), (), None, 0, 0, 0.0)


class ChunkProgress:
    """A chunk on its way: its finished parts, and of the one under way what is final."""

    def __init__(self) -> None:
        self.parts: list[DecodedPart] = []
        self._task: asyncio.Task[list[DecodedPart]] | None = None
        self._changed = asyncio.Event()
        self._has_begun = asyncio.Event()

    def watch(self, task: asyncio.Task[list[DecodedPart]]) -> None:
        """The task that reads the chunk."""
        self._task = task
        task.add_done_callback(lambda _: self._on_change())

    def report(self, parts: list[DecodedPart]) -> None:
        self.parts = parts
        self._on_change()

    def num_spans(self, part: int) -> int:
        """Of the part with this number, reported so far: they stand."""
        return len(self.parts[part].spans) if part < len(self.parts) else 0

    def _on_change(self) -> None:
        self._changed.set()
        self._has_begun.set()

    def on_wait_for_others(self) -> None:
        """What ends this chunk are other chunks, which may wait for its first text: they need not."""
        self._has_begun.set()

    async def first_text(self) -> None:
        """Waits for the first report, for the end where there is none, or until others must go on first."""
        await self._has_begun.wait()

    async def is_finished(self) -> bool:
        """Waits for more; whether that was the last of it."""
        await self._changed.wait()
        self._changed.clear()
        return self._task is not None and self._task.done()

    async def result(self) -> list[DecodedPart]:
        """All parts. Raises what has ended the reading."""
        assert self._task is not None
        return await self._task


class EarlyResults:
    """What has been reported of one part."""

    def __init__(self) -> None:
        self.last: ChunkResult | None = None

    def add(self, result: ChunkResult) -> bool:
        """False for one that does not go on from the last one: it comes from another replica."""
        if not self._is_beginning_of(result):
            return False
        self.last = result
        return True

    def keep(self, result: ChunkResult, options: DecodingOptions) -> ChunkResult:
        """The part's result; what has been reported where that would take it back."""
        if self.last is None or (self._is_beginning_of(result) and not is_silence(result, options)):
            return result
        return self.last

    def _is_beginning_of(self, result: ChunkResult) -> bool:
        last = self.last
        return last is None or result.tokens[: len(last.tokens)] == last.tokens


def beyond(sent: TranscriptDelta, whole: TranscriptDelta) -> TranscriptDelta:
    """What `whole` has that has not been sent of it yet."""
    assert whole.text.startswith(sent.text), "a delta is final when it is sent"
    return msgspec.structs.replace(
        whole,
        text=whole.text[len(sent.text) :],
        logprobs=whole.logprobs[len(sent.logprobs) :],
        num_text_tokens=whole.num_text_tokens - sent.num_text_tokens,
    )
