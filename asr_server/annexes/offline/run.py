"""Run `asr-server transcribe`, from checks to exit status.

Many recordings share one transcriber; one's error does not stop the others. Standard error shows
progress, as bars on a terminal, and the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from asr_server.annexes.offline.inputs import Failure, Input, buffered, collect_inputs, reason_of
from asr_server.annexes.offline.local import FileTranscriber, TranscribeJob
from asr_server.annexes.offline.outputs import (
    FolderOutputs,
    OutputError,
    Outputs,
    StandardOutput,
    check_writable,
)
from asr_server.annexes.offline.progress import SOME_FAILED, SUCCESS, ProgressBars, Summary, speed_of
from asr_server.core import Track, Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue, RequestError
from asr_server.transcription import task_group

FILES_AT_ONCE: Final = 16

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def work_through(items: AsyncIterator[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Work on the items in order, sixteen at once. Raises the first error of `items` or `work`."""
    reading = asyncio.Lock()

    async def work_on() -> None:
        while True:
            async with reading:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await work(item)

    async with task_group() as group:
        for _ in range(FILES_AT_ONCE):
            group.create_task(work_on())


async def _each(indices: Sequence[int]) -> AsyncIterator[int]:
    for index in indices:
        yield index


@dataclass(frozen=True)
class Batch:
    inputs: Sequence[Input]
    transcriber: FileTranscriber
    outputs: Outputs
    summary: Summary
    bars: ProgressBars

    async def run(self, indices: Sequence[int]) -> None:
        """Transcribe these inputs.

        Raises:
            EngineUnavailable, InvalidValue, OutputError: no input can continue.
        """
        self.outputs.begin(indices)
        started_at_s = time.perf_counter()
        with self.bars.shown():
            try:
                await work_through(_each(indices), self.work)
            finally:
                self.summary.elapsed_s = time.perf_counter() - started_at_s

    async def work(self, index: int) -> None:
        """Transcribe one input; note what fails."""
        item = self.inputs[index]
        try:
            await self._transcribe(index, item)
        except (EngineUnavailable, InvalidValue, OutputError):
            raise
        except Exception as error:
            self.summary.failures.append(Failure(item.name, reason_for(item.name, error)))
            await self.outputs.leave_out(index)

    async def _transcribe(self, index: int, item: Input) -> None:
        bar = self.bars.begin(item.name)
        started_at_s = time.perf_counter()
        try:
            transcript = await self.transcriber.transcribe(
                item.source, lambda done_s, total_s: self.bars.move(bar, done_s, total_s)
            )
            written = await self.outputs.write(index, transcript)
        finally:
            self.bars.finish(bar)
        self._report(item, transcript, time.perf_counter() - started_at_s, written)

    def _report(self, item: Input, transcript: Transcript, elapsed_s: float, written: str) -> None:
        self.summary.num_transcribed += 1
        self.summary.audio_s += transcript.duration_s
        if transcript.is_cut_short:
            self.summary.cut_short.append(item.name)
        if not transcript.text:
            of = f"{transcript.duration_s:.1f} s (model {self.transcriber.model})"
            self.summary.unheard.append(f"{item.name}: no speech recognised in {of}")
        if transcript.tracks:
            tracks = " and ".join(_described(track) for track in transcript.tracks)
            self.bars.say(f"{item.name}: several audio tracks; read {tracks}")
        destination = f" -> {written}" if written else ""
        self.bars.say(f"{item.name}: {speed_of(transcript.duration_s, elapsed_s)}{destination}")


def _described(track: Track) -> str:
    return f"number {track.number}" + (f" ({track.language})" if track.language else "")


def reason_for(name: str, error: Exception) -> str:
    match error:
        case RequestError():
            return error.message
        case ChunkFailed():
            return str(error)
        case OSError():
            return reason_of(error)
    logger.error("%s: unexpected", name, exc_info=error)  # a mistake of this program, not of the file
    return f"{type(error).__name__}: {error}"


INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


@contextlib.contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """Cancel this task at TERM. A handler that outlived the loop would write a traceback at each signal."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def transcribe_files(make_transcriber: Callable[[TranscribeJob], FileTranscriber], job: TranscribeJob) -> int:
    """Transcribe the job's recordings; return the exit status. Idle jobs make no transcriber.

    Raises:
        OutputError, InvalidValue: nothing can be transcribed or written.
    """
    if job.output_dir is not None:
        check_writable(job.output_dir)
    inputs, failures = collect_inputs(job.arguments, job.recursive)
    folder = job.output_dir
    outputs = FolderOutputs(folder, inputs, job) if folder is not None else StandardOutput(inputs, job)
    summary = Summary(len(inputs) + len(failures), failures=failures)
    todo = list(_indices_to_do(inputs, outputs, summary))
    if todo:
        transcriber = make_transcriber(job)  # before a stream is read, which cannot be read twice
        todo = list(_buffer_streams(inputs, todo, summary))
        batch = Batch(inputs, transcriber, outputs, summary, ProgressBars(len(todo), job.quiet))
        run = _run(transcriber, batch, todo)
        try:
            summary.stop_reason, summary.stop_status = run_to_the_end(lambda: asyncio.run(run))
        except InvalidValue as error:  # a key that changed midway, say: what was done is told all the same
            if not summary.num_transcribed:
                raise
            summary.stop_reason, summary.stop_status = str(error), SOME_FAILED
        with contextlib.suppress(OutputError):
            outputs.close()
    summary.show(job.quiet)
    return summary.exit_status


def _indices_to_do(inputs: Sequence[Input], outputs: Outputs, summary: Summary) -> Iterator[int]:
    for index in range(len(inputs)):
        if outputs.is_done(index):
            summary.num_skipped += 1
        elif failure := outputs.prepare(index):
            summary.failures.append(failure)
        else:
            yield index


def _buffer_streams(inputs: list[Input], indices: Sequence[int], summary: Summary) -> Iterator[int]:
    """Read standard input and pipes in the main thread, where Ctrl-C works."""
    for index in indices:
        try:
            inputs[index] = buffered(inputs[index])
        except OSError as error:
            summary.failures.append(Failure(inputs[index].name, reason_of(error)))
        else:
            yield index


def run_to_the_end(run: Callable[[], None]) -> tuple[str, int]:
    """Return why it ended early, if so, and the exit status.

    Ctrl-C and TERM drop what is under way and end the engine; written results stay.
    """
    try:
        run()
    except KeyboardInterrupt:
        return "interrupted", INTERRUPTED
    except asyncio.CancelledError:
        return "terminated", TERMINATED
    except (EngineUnavailable, OutputError, OSError) as error:
        return reason_of(error) if isinstance(error, OSError) else str(error), SOME_FAILED
    return "", SUCCESS


async def _run(transcriber: FileTranscriber, batch: Batch, indices: Sequence[int]) -> None:
    with cancelled_by_sigterm():
        async with transcriber.running():
            await batch.run(indices)
