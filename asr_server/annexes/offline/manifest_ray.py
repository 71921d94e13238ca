"""Run a manifest as actors of a Ray cluster. Imported for `--executor ray` alone.

The driver hands out byte ranges by number; actors read and transcribe.
"""

import asyncio
import logging
import math
import os
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import ray.data

from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob, work_through
from asr_server.annexes.offline.manifest import (
    Entry,
    JobStopped,
    LineReport,
    LineTranscriber,
    Reports,
    read_entries,
)
from asr_server.annexes.offline.outputs import OutputError
from asr_server.checkpoint.files import name_elsewhere
from asr_server.config import Settings
from asr_server.errors import EngineUnavailable
from asr_server.telemetry import configure_logging

MIN_PART_BYTES: Final = 1 << 10  # some ten lines
MAX_PART_BYTES: Final = 1 << 16  # some hundreds: what is done again, at most, where a node is lost
PARTS_FOR_EACH_ACTOR: Final = 128  # so that all actors end at about the same time
PARTS_AT_ONCE: Final = 2  # by one actor, so that the end of one part leaves no slot empty

_REPORT: Final = msgspec.json.Decoder(LineReport | JobStopped)


def run_on_ray(
    settings: Settings, job: TranscribeJob, reports: Reports, repeats: Mapping[int, int], address: str
) -> None:
    quiet = settings.log_level != "debug"
    if quiet:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the driver's part of Ray writes to stderr
    ray.init(address=address, log_to_driver=not quiet, logging_level=logging.ERROR if quiet else logging.INFO)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # there is one of our own
        if quiet:
            logging.getLogger("ray.data").setLevel(logging.ERROR)
        for row in _dataset(settings, job, repeats).iter_rows():
            report = _REPORT.decode(row["report"])
            if isinstance(report, JobStopped):
                raise OutputError(report.reason)
            reports.add(report)
    except ray.exceptions.RayError as error:
        raise OutputError(f"Ray: {str(error).strip().splitlines()[-1]}") from error
    finally:
        ray.shutdown()


def _dataset(settings: Settings, job: TranscribeJob, repeats: Mapping[int, int]) -> ray.data.Dataset:
    assert job.manifest is not None
    assert job.output_dir is not None
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    num_gpus, num_ranks = int(resources.get("GPU", 0)), settings.tensor_parallel_size
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and num_gpus > 0)
    num_nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
    num_actors = settings.replicas or (num_gpus // num_ranks if on_gpu else num_nodes)
    num_bytes = job.manifest.stat().st_size
    share = num_bytes // (PARTS_FOR_EACH_ACTOR * max(1, num_actors))
    part_bytes = max(MIN_PART_BYTES, min(MAX_PART_BYTES, share))
    num_parts = math.ceil(num_bytes / part_bytes)
    model = name_elsewhere(Path(settings.model))
    # Actors have their own working directories.
    job = replace(job, manifest=job.manifest.absolute(), output_dir=job.output_dir.absolute())
    if num_parts == 0:
        return ray.data.from_items([])
    return ray.data.range(num_parts, override_num_blocks=num_parts).map_batches(
        PartTranscriber,
        fn_constructor_kwargs={
            "settings": replace(settings.core, executor="multiprocess", replicas=1, model=model),
            "job": job,
            "part_bytes": part_bytes,
            "repeats": repeats,
        },
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=num_actors, max_tasks_in_flight_per_actor=PARTS_AT_ONCE + 1),
        num_cpus=1,
        num_gpus=num_ranks if on_gpu else 0,
        max_concurrency=PARTS_AT_ONCE,
        scheduling_strategy="SPREAD",
    )


class PartTranscriber:
    def __init__(
        self, settings: Settings, job: TranscribeJob, part_bytes: int, repeats: Mapping[int, int]
    ) -> None:
        assert job.manifest is not None
        configure_logging(settings.log_level, settings.log_format, "actor")
        model = str(resolve_checkpoint(settings.model))  # fetched to this node if need be
        transcriber = LocalTranscriber(replace(settings, model=model), job)
        self._manifest, self._part_bytes = job.manifest, part_bytes
        self._lines = LineTranscriber(transcriber, job, repeats)
        self._running = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="pipeline", daemon=True).start()
        self._await(self._running.enter_async_context(transcriber.running()))

    def __call__(self, parts: dict[str, Any]) -> dict[str, list[bytes]]:
        reports = [report for part in parts["id"].tolist() for report in self._await(self._transcribe(part))]
        return {"report": [msgspec.json.encode(report) for report in reports]}

    def _await(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _transcribe(self, part: int) -> list[LineReport | JobStopped]:
        start, reports = part * self._part_bytes, list[LineReport | JobStopped]()
        entries = read_entries(self._manifest, start, start + self._part_bytes)

        async def work(line: Entry | LineReport) -> None:
            reports.append(await self._lines.transcribe(line))

        try:
            await work_through(self._lines.sorted_out(entries), work)
        except (EngineUnavailable, OutputError, OSError) as error:
            return [JobStopped(str(error))]
        return reports
