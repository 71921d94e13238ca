"""Runs many recordings through one transcriber at once and carries the results to the outputs.

Used by `run.py`. What goes wrong with one recording does not stop the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue, RequestError
from asr_server.offline.inputs import Failure, Input, reason_of
from asr_server.offline.outputs import OutputError, Outputs
from asr_server.offline.progress import ProgressBars
from asr_server.offline.summary import Summary
from asr_server.offline.transcriber import FileTranscriber
from asr_server.transcription import first_error

FILES_AT_ONCE: Final = 16

logger = logging.getLogger(__name__)


class Batch:
    """Carries results from the transcriber to the outputs, and keeps the summary and the bars up to date."""

    def __init__(
        self,
        inputs: Sequence[Input],
        transcriber: FileTranscriber,
        outputs: Outputs,
        summary: Summary,
        bars: ProgressBars,
    ) -> None:
        self._inputs = inputs
        self._transcriber = transcriber
        self._outputs = outputs
        self._summary = summary
        self._bars = bars

    async def run(self, indices: Sequence[int]) -> None:
        """Transcribes the inputs with these indices.

        Raises:
            EngineUnavailable, InvalidValue, OutputError: no further input can be transcribed, or written.
        """
        self._outputs.begin(indices)
        remaining = iter(indices)
        with self._bars.shown():
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(FILES_AT_ONCE, len(indices))):
                        group.create_task(self._work(remaining))
            except BaseExceptionGroup as errors:
                raise first_error(errors) from None

    async def _work(self, remaining: Iterator[int]) -> None:
        for index in remaining:
            item = self._inputs[index]
            try:
                await self._transcribe(index, item)
            except (EngineUnavailable, InvalidValue, OutputError):
                raise
            except Exception as error:
                self._summary.failures.append(Failure(item.name, reason_for(item.name, error)))
                await self._outputs.leave_out(index)

    async def _transcribe(self, index: int, item: Input) -> None:
        bar = self._bars.start(item.name)
        try:
            transcript = await self._transcriber.transcribe(
                item.source, lambda done_s, total_s: self._bars.move(bar, done_s, total_s)
            )
            written = await self._outputs.write(index, transcript)
        finally:
            self._bars.finish(bar)
        self._summary.num_transcribed += 1
        if transcript.is_cut_short:
            self._summary.cut_short.append(item.name)
        if written:
            self._bars.say(f"{item.name}: {transcript.duration_s:.1f} s -> {written}")


def reason_for(name: str, error: Exception) -> str:
    """Why there is no result for a recording, in a line."""
    match error:
        case RequestError():
            return error.message
        case ChunkFailed():
            return str(error)
        case OSError():
            return reason_of(error)
    logger.error("%s: unexpected", name, exc_info=error)  # a mistake of this program, not of the file
    return f"{type(error).__name__}: {error}"
