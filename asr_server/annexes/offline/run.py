"""Run `asr-server transcribe`, from checks to exit status: named recordings, or a manifest."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from asr_server.annexes.offline.inputs import Failure, Input, buffered, collect_inputs, reason_for, reason_of
from asr_server.annexes.offline.local import FileTranscriber, LocalTranscriber, TranscribeJob, work_through
from asr_server.annexes.offline.manifest import (
    Entry,
    LineReport,
    LineTranscriber,
    Reports,
    read_entries,
    survey,
)
from asr_server.annexes.offline.outputs import (
    FolderOutputs,
    OutputError,
    Outputs,
    StandardOutput,
    check_writable,
)
from asr_server.annexes.offline.progress import SOME_FAILED, SUCCESS, ProgressBars, Summary, say, speed_of
from asr_server.annexes.ray import RaySettings
from asr_server.annexes.ray.cluster import cluster_address
from asr_server.config import Settings
from asr_server.core import Transcript
from asr_server.errors import EngineUnavailable, InvalidValue


@dataclass(frozen=True)
class Batch:
    inputs: Sequence[Input]
    transcriber: FileTranscriber
    outputs: Outputs
    summary: Summary
    bars: ProgressBars

    async def run(self, indices: Sequence[int]) -> None:
        """Transcribe these inputs. Raises EngineUnavailable, InvalidValue, OutputError for all."""
        self.outputs.begin(indices)
        started_at_s = time.perf_counter()
        with self.bars.progress:
            try:
                await work_through(iter(indices), self.work)
            finally:
                self.summary.elapsed_s = time.perf_counter() - started_at_s

    async def work(self, index: int) -> None:
        item, started_at_s = self.inputs[index], time.perf_counter()
        bar = self.bars.begin(item.name)
        try:
            transcript = await self.transcriber.transcribe(item.source, partial(self.bars.move, bar))
            written = await self.outputs.write(index, transcript)
            self._report(item, transcript, time.perf_counter() - started_at_s, written)
        except (EngineUnavailable, InvalidValue, OutputError):
            raise
        except Exception as error:
            self.summary.failures.append(Failure(item.name, reason_for(item.name, error)))
            await self.outputs.leave_out(index)
        finally:
            self.bars.finish(bar)

    def _report(self, item: Input, transcript: Transcript, elapsed_s: float, written: str) -> None:
        self.summary.num_transcribed += 1
        self.summary.audio_s += transcript.duration_s
        if transcript.is_cut_short:
            self.summary.cut_short.append(item.name)
        if not transcript.text:
            of = f"{transcript.duration_s:.1f} s (model {self.transcriber.model})"
            self.summary.unheard.append(f"{item.name}: no speech recognised in {of}")
        if transcript.tracks:
            tracks = " and ".join(
                f"number {track.number}" + (f" ({track.language})" if track.language else "")
                for track in transcript.tracks
            )
            self.bars.say(f"{item.name}: several audio tracks; read {tracks}")
        destination = f" -> {written}" if written else ""
        self.bars.say(f"{item.name}: {speed_of(transcript.duration_s, elapsed_s)}{destination}")


INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


def transcribe_files(make_transcriber: Callable[[TranscribeJob], FileTranscriber], job: TranscribeJob) -> int:
    """Transcribe the job's recordings; return the exit status. Raises OutputError, InvalidValue."""
    if (folder := job.output_dir) is not None:
        check_writable(folder)
    inputs, failures = collect_inputs(job.arguments, job.recursive)
    outputs = FolderOutputs(folder, inputs, job) if folder is not None else StandardOutput(inputs, job)
    summary = Summary(len(inputs) + len(failures), failures=failures)
    todo = list(_indices_to_do(inputs, outputs, summary))
    if todo:
        transcriber = make_transcriber(job)  # before a stream is read, which cannot be read twice
        todo = list(_buffer_streams(inputs, todo, summary))
        batch = Batch(inputs, transcriber, outputs, summary, ProgressBars(len(todo), job.quiet))
        run = partial(_run, transcriber, partial(batch.run, todo))
        try:
            summary.stop_reason, summary.stop_status = run_to_the_end(lambda: asyncio.run(run()))
        except InvalidValue as error:  # a key that changed midway, say: what was done is reported
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
    """Return why it ended early, if so, and the exit status. Written results stay."""
    try:
        run()
    except KeyboardInterrupt:
        return "interrupted", INTERRUPTED
    except asyncio.CancelledError:
        return "terminated", TERMINATED
    except (EngineUnavailable, OutputError, OSError) as error:
        return reason_of(error) if isinstance(error, OSError) else str(error), SOME_FAILED
    return "", SUCCESS


async def _run(transcriber: FileTranscriber, work: Callable[[], Awaitable[None]]) -> None:
    """Cancel the work at TERM."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with transcriber.running():
            await work()
    finally:  # a handler that outlived the loop would write a traceback at each signal
        loop.remove_signal_handler(signal.SIGTERM)


def transcribe_manifest(settings: Settings, job: TranscribeJob) -> int:
    """Transcribe every entry without a result; return the exit status. Raises OutputError, InvalidValue."""
    assert job.manifest is not None
    assert job.output_dir is not None
    check_writable(job.output_dir)
    transcriber = LocalTranscriber(settings, job)  # checks the options, for actors elsewhere too
    num_lines, repeats = survey(job.manifest)
    reports = Reports(job.output_dir, num_lines, job.quiet)
    with reports.bars.progress:
        if settings.executor == "ray":
            stop_reason, status = run_to_the_end(lambda: _run_on_ray(settings, job, reports, repeats))
        else:
            lines = LineTranscriber(transcriber, job, repeats)

            async def work(line: Entry | LineReport) -> None:
                reports.add(await lines.transcribe(line))

            run = partial(work_through, lines.sorted_out(read_entries(job.manifest)), work)
            stop_reason, status = run_to_the_end(lambda: asyncio.run(_run(transcriber, run)))
    if stop_reason:
        say(f"stopped: {stop_reason}")
    if not job.quiet:
        say(reports.numbers())
    return status or (SOME_FAILED if reports.counts["failed"] else SUCCESS)


def _run_on_ray(settings: Settings, job: TranscribeJob, reports: Reports, repeats: Mapping[int, int]) -> None:
    signal.signal(signal.SIGTERM, _cancel)
    with cluster_address(settings.part(RaySettings).ray_address) as address:
        # Ray reads its environment at the import.
        from asr_server.annexes.offline.manifest_ray import run_on_ray

        run_on_ray(settings, job, reports, repeats, address)


def _cancel(*_: object) -> None:
    raise asyncio.CancelledError
