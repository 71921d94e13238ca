"""Run `asr-server transcribe --manifest`, from checks to exit status. Imports Ray on request."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from asr_server.config import Settings
from asr_server.dispatch.ray_cluster import cluster_address
from asr_server.offline.inputs import reason_of
from asr_server.offline.local import LocalTranscriber, TranscribeJob
from asr_server.offline.manifest import (
    Entry,
    LineReport,
    LineTranscriber,
    ManifestResults,
    Reports,
    Survey,
    read_entries,
    survey,
)
from asr_server.offline.outputs import OutputError, check_writable, ignores_case
from asr_server.offline.progress import SOME_FAILED, SUCCESS
from asr_server.offline.run import FILES_AT_ONCE, cancel_on_sigterm, run_to_the_end
from asr_server.telemetry import printable
from asr_server.transcription import task_group

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
    surveyed = _survey(job.manifest, job.output_dir)
    with Reports(job.output_dir, surveyed.num_lines, job.quiet) as reports:
        if settings.executor == "ray":
            stop_reason, status = run_to_the_end(
                lambda: _run_on_ray(settings, job, reports, surveyed.repeats)
            )
        else:
            run = ManifestRun(transcriber, job, reports, surveyed.repeats)
            stop_reason, status = run_to_the_end(lambda: asyncio.run(run.run()))
    if stop_reason:
        print(printable(f"stopped: {stop_reason}"), file=sys.stderr)
    if not job.quiet:
        print(reports.numbers(), file=sys.stderr)
    return status or (SOME_FAILED if reports.counts["failed"] else SUCCESS)


def _survey(manifest: Path, folder: Path) -> Survey:
    try:
        return survey(manifest, ignores_case(folder))
    except OSError as error:
        raise OutputError(f"cannot read the manifest {manifest}: {reason_of(error)}") from error


def _run_on_ray(settings: Settings, job: TranscribeJob, reports: Reports, repeats: Mapping[int, int]) -> None:
    signal.signal(signal.SIGTERM, _cancel)
    with cluster_address(settings.ray_address) as address:
        from asr_server.offline.manifest_ray import run_on_ray  # Ray: reads its environment at the import

        run_on_ray(settings, job, reports, repeats, address)


def _cancel(*_: object) -> None:
    raise asyncio.CancelledError


class ManifestRun:
    """One reader a few entries ahead, and enough entries under way to keep the engine busy."""

    def __init__(
        self, transcriber: LocalTranscriber, job: TranscribeJob, reports: Reports, repeats: Mapping[int, int]
    ) -> None:
        assert job.manifest is not None
        assert job.output_dir is not None
        self._transcriber = transcriber
        self._lines = LineTranscriber(transcriber, ManifestResults(job.output_dir, job), repeats)
        self._manifest = job.manifest
        self._reports = reports
        self._entries: asyncio.Queue[Entry | None] = asyncio.Queue(maxsize=FILES_AT_ONCE)

    async def run(self) -> None:
        cancel_on_sigterm()
        async with self._transcriber.running(), task_group() as group:
            group.create_task(self._read())
            for _ in range(FILES_AT_ONCE):
                group.create_task(self._transcribe())

    async def _read(self) -> None:
        lines = self._lines.sorted_out(read_entries(self._manifest))
        while batch := await asyncio.to_thread(lambda: list(islice(lines, _LINES_AT_ONCE))):
            for line in batch:
                if isinstance(line, LineReport):
                    self._reports.add(line)
                else:
                    await self._entries.put(line)
        for _ in range(FILES_AT_ONCE):
            await self._entries.put(None)

    async def _transcribe(self) -> None:
        while (entry := await self._entries.get()) is not None:
            self._reports.add(await self._lines.transcribe(entry))
