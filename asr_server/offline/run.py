"""Takes a call of `asr-server transcribe` from its checks to its exit status, for `cli/transcribe.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from asr_server.errors import EngineUnavailable
from asr_server.offline.batch import Batch
from asr_server.offline.folder import FolderOutputs, check_writable
from asr_server.offline.inputs import Failure, Input, buffered, collect_inputs, reason_of
from asr_server.offline.job import TranscribeJob
from asr_server.offline.outputs import OutputError, Outputs
from asr_server.offline.progress import ProgressBars
from asr_server.offline.standard_output import StandardOutput
from asr_server.offline.stopping import INTERRUPTED, TERMINATED, cancel_on_sigterm
from asr_server.offline.summary import SOME_FAILED, Summary
from asr_server.offline.transcriber import FileTranscriber


def transcribe_files(make_transcriber: Callable[[TranscribeJob], FileTranscriber], job: TranscribeJob) -> int:
    """Transcribes every recording that the job names. Returns the exit status of the command.

    The transcriber is made only if there is something to transcribe.

    Raises:
        OutputError, InvalidValue: something is wrong for all; nothing was decoded.
    """
    if job.output_dir is not None:
        check_writable(job.output_dir)
    inputs, failures = collect_inputs(job.arguments, job.recursive)
    outputs = _open_outputs(inputs, job)
    summary = Summary(len(inputs) + len(failures), failures=failures)
    todo = list(_indices_to_do(inputs, outputs, summary))
    if todo:
        transcriber = make_transcriber(job)  # before a stream is read, which cannot be read twice
        todo = list(_buffer_streams(inputs, todo, summary))
        batch = Batch(inputs, transcriber, outputs, summary, ProgressBars(len(todo), job.quiet))
        _run_to_the_end(_run(transcriber, batch, todo), summary)
        with contextlib.suppress(OutputError):
            outputs.close()
    summary.show(job.quiet)
    return summary.exit_status


def _open_outputs(inputs: Sequence[Input], job: TranscribeJob) -> Outputs:
    if job.output_dir is None:
        return StandardOutput(inputs, job)
    return FolderOutputs(job.output_dir, inputs, job)


def _indices_to_do(inputs: Sequence[Input], outputs: Outputs, summary: Summary) -> Iterator[int]:
    for index in range(len(inputs)):
        if outputs.is_done(index):
            summary.num_skipped += 1
        elif failure := outputs.prepare(index):
            summary.failures.append(failure)
        else:
            yield index


def _buffer_streams(inputs: list[Input], indices: Sequence[int], summary: Summary) -> Iterator[int]:
    """Reads standard input and pipes to their end; in the main thread, where Ctrl-C can end the wait."""
    for index in indices:
        try:
            inputs[index] = buffered(inputs[index])
        except OSError as error:
            summary.failures.append(Failure(inputs[index].name, reason_of(error)))
        else:
            yield index


def _run_to_the_end(run: Coroutine[Any, Any, None], summary: Summary) -> None:
    """Ctrl-C and TERM end it in order: what is under way is dropped, and the engine leaves."""
    try:
        asyncio.run(run)
    except KeyboardInterrupt:
        summary.stop("interrupted", INTERRUPTED)
    except asyncio.CancelledError:
        summary.stop("terminated", TERMINATED)
    except (EngineUnavailable, OutputError) as error:
        summary.stop(str(error), SOME_FAILED)


async def _run(transcriber: FileTranscriber, batch: Batch, indices: Sequence[int]) -> None:
    cancel_on_sigterm()
    async with transcriber.running():
        await batch.run(indices)
