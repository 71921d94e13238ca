"""Run `asr-server transcribe --manifest`, from checks to exit status. Imports Ray on request."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from asr_server.annexes.offline.inputs import reason_of
from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.annexes.offline.manifest import (
    Entry,
    LineReport,
    LineTranscriber,
    ManifestResults,
    Reports,
    Survey,
    read_entries,
    survey,
)
from asr_server.annexes.offline.outputs import OutputError, check_writable
from asr_server.annexes.offline.progress import SOME_FAILED, SUCCESS
from asr_server.annexes.offline.run import cancelled_by_sigterm, run_to_the_end, work_through
from asr_server.annexes.ray.cluster import cluster_address
from asr_server.config import Settings
from asr_server.telemetry import printable

_LINES_AT_ONCE: Final = 256  # read and looked up on the disk in one go


def transcribe_manifest(settings: Settings, job: TranscribeJob) -> int:
    """Transcribe every entry without a result; return the exit status.

    Raises:
        OutputError, InvalidValue: nothing can be transcribed or written.
    """
    assert job.manifest is not None
    assert job.output_dir is not None
    check_writable(job.output_dir)
    transcriber = LocalTranscriber(settings, job)  # checks the options, for actors elsewhere too
    surveyed = _survey(job.manifest)
    with Reports(job.output_dir, surveyed.num_lines, job.quiet) as reports:
        if settings.executor == "ray":
            stop_reason, status = run_to_the_end(
                lambda: _run_on_ray(settings, job, reports, surveyed.repeats)
            )
        else:
            lines = LineTranscriber(transcriber, ManifestResults(job.output_dir, job), surveyed.repeats)
            run = _run_here(transcriber, lines, job.manifest, reports)
            stop_reason, status = run_to_the_end(lambda: asyncio.run(run))
    if stop_reason:
        print(printable(f"stopped: {stop_reason}"), file=sys.stderr)
    if not job.quiet:
        print(reports.numbers(), file=sys.stderr)
    return status or (SOME_FAILED if reports.counts["failed"] else SUCCESS)


def _survey(manifest: Path) -> Survey:
    try:
        return survey(manifest)
    except OSError as error:
        raise OutputError(f"cannot read the manifest {manifest}: {reason_of(error)}") from error


def _run_on_ray(settings: Settings, job: TranscribeJob, reports: Reports, repeats: Mapping[int, int]) -> None:
    signal.signal(signal.SIGTERM, _cancel)
    with cluster_address(settings.ray_address) as address:
        from asr_server.annexes.offline.manifest_ray import (
            run_on_ray,  # Ray: reads its environment at the import
        )

        run_on_ray(settings, job, reports, repeats, address)


def _cancel(*_: object) -> None:
    raise asyncio.CancelledError


async def _run_here(
    transcriber: LocalTranscriber, lines: LineTranscriber, manifest: Path, reports: Reports
) -> None:
    async def work(entry: Entry) -> None:
        reports.add(await lines.transcribe(entry))

    with cancelled_by_sigterm():
        async with transcriber.running():
            await work_through(_entries(lines, manifest, reports), work)


async def _entries(lines: LineTranscriber, manifest: Path, reports: Reports) -> AsyncIterator[Entry]:
    sorted_out = lines.sorted_out(read_entries(manifest))
    while batch := await asyncio.to_thread(lambda: list(islice(sorted_out, _LINES_AT_ONCE))):
        for line in batch:
            if isinstance(line, LineReport):
                reports.add(line)
            else:
                yield line
