"""Run `asr-server transcribe --watch`: transcribe recordings as they come into a folder.

Results alone tell what is done, so that a restart does nothing twice. A recording that changes after its
result is transcribed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from asr_server.offline.inputs import Failure, Input, arrived, walk
from asr_server.offline.local import FileTranscriber, TranscribeJob
from asr_server.offline.outputs import FolderOutputs, check_writable
from asr_server.offline.progress import ProgressBars, Summary, say
from asr_server.offline.run import FILES_AT_ONCE, Batch, cancel_on_sigterm, run_to_the_end
from asr_server.transcription import task_group

LOOK_S: Final = 2.0  # between two looks: what has not changed in between is complete
LOOK_SHARE: Final = 10  # a look at a large folder may take a tenth of the time


class Stamp(NamedTuple):
    num_bytes: int
    modified_ns: int


class Arrivals:
    """Find recordings that have stopped growing. Holds a stamp for each file of the folder."""

    def __init__(self, folder: Path, recursive: bool) -> None:
        self._folder, self._recursive = folder, recursive
        self._last: dict[Path, Stamp] = {}
        self._given: dict[Path, Stamp] = {}

    def look(self) -> list[Input]:
        """Return what has not changed since the last look, each state of a file once. Blocks."""
        failures: list[Failure] = []  # of folders that cannot be read now
        stamps: dict[Path, Stamp] = {}
        for path in walk(self._folder, self._recursive, failures):
            with contextlib.suppress(OSError):  # it has gone again
                stamps[path] = _stamp(path)
        steady = {path: stamp for path, stamp in stamps.items() if self._last.get(path) == stamp}
        new = [path for path, stamp in steady.items() if stamp.num_bytes and self._given.get(path) != stamp]
        self._last = stamps
        self._given = {path: stamp for path, stamp in self._given.items() if path in stamps}
        self._given |= {path: steady[path] for path in new}
        return [arrived(path, self._folder) for path in new]


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns)


class Watch:
    def __init__(self, transcriber: FileTranscriber, job: TranscribeJob, look_s: float = LOOK_S) -> None:
        assert job.watch is not None
        assert job.output_dir is not None
        self.counts: Counter[str] = Counter()
        self._transcriber = transcriber
        self._job = replace(job, existing="overwrite")  # what is done is not begun
        self._folder = job.output_dir
        self._look_s = look_s
        self._arrivals = Arrivals(job.watch, job.recursive)
        self._bars = ProgressBars(1, job.quiet)
        self._queue: asyncio.Queue[Input] = asyncio.Queue(maxsize=FILES_AT_ONCE)

    async def run(self) -> None:
        """Transcribe until cancelled.

        Raises:
            EngineUnavailable, InvalidValue, OutputError: no recording can be transcribed any more.
        """
        cancel_on_sigterm()
        async with self._transcriber.running(), task_group() as group:
            with self._bars.shown():
                for _ in range(FILES_AT_ONCE):
                    group.create_task(self._work())
                await self._look()

    async def _look(self) -> None:
        while True:
            started_at = time.perf_counter()
            found = await asyncio.to_thread(self._arrivals.look)
            took_s = time.perf_counter() - started_at
            for item in found:
                await self._queue.put(item)
            await asyncio.sleep(max(self._look_s, LOOK_SHARE * took_s))

    async def _work(self) -> None:
        while True:
            item = await self._queue.get()
            outputs = await asyncio.to_thread(FolderOutputs, self._folder, [item], self._job)
            if not _is_done(item, outputs):
                await self._transcribe(item, outputs)

    async def _transcribe(self, item: Input, outputs: FolderOutputs) -> None:
        summary = Summary()
        if failure := outputs.prepare(0):
            summary.failures.append(failure)
        else:
            batch = Batch([item], self._transcriber, outputs, summary, self._bars)
            await batch.work(iter([0]))
        summary.show_troubles()
        self.counts["transcribed"] += summary.num_transcribed
        self.counts["failed"] += len(summary.failures)


def _is_done(item: Input, outputs: FolderOutputs) -> bool:
    assert isinstance(item.source, Path)
    try:
        modified_ns = _stamp(item.source).modified_ns
        return all(_stamp(path).modified_ns >= modified_ns for path in outputs.paths(0))
    except OSError:  # one is not there
        return False


def watch_folder(make_transcriber: Callable[[TranscribeJob], FileTranscriber], job: TranscribeJob) -> int:
    """Transcribe what comes into the job's folder until a signal; return the exit status.

    Raises:
        OutputError, InvalidValue: nothing can be transcribed or written.
    """
    assert job.output_dir is not None
    check_writable(job.output_dir)
    watch = Watch(make_transcriber(job), job)
    total = Summary()
    total.stop_reason, total.stop_status = run_to_the_end(lambda: asyncio.run(watch.run()))
    total.show_troubles()
    if not job.quiet:
        done = ", ".join(f"{count} {what}" for what, count in watch.counts.items() if count)
        say(done or "nothing transcribed")
    return total.exit_status
