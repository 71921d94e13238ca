"""Figures of all jobs for `/metrics`, as of the last look."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import Gauge
from sqlalchemy import Connection, func, select

from asr_server.annexes.jobs.store import STATUSES, Store
from asr_server.metrics import REGISTRY

jobs_kept: Final = Gauge("asr_jobs", "Jobs kept, by status.", ("status",), registry=REGISTRY)
queued_audio: Final = Gauge(
    "asr_jobs_queued_audio_seconds", "Audio of queued jobs, where their headers say.", registry=REGISTRY
)
oldest_queued: Final = Gauge(
    "asr_jobs_oldest_queued_seconds", "Age of the oldest queued job.", registry=REGISTRY
)


async def measure(store: Store) -> None:
    """Raises StorageUnavailable."""
    jobs = store.table("jobs")
    query = select(jobs.c.status, func.count(), func.sum(jobs.c.duration_s), func.min(jobs.c.created_at))

    def work(connection: Connection) -> dict[str, tuple[int, float | None, float]]:
        return {status: (*rest,) for status, *rest in connection.execute(query.group_by(jobs.c.status))}

    by_status = await store.run(work)
    for status in STATUSES:
        jobs_kept.labels(status).set(by_status.get(status, (0,))[0])
    now = time.time()
    _, audio_s, created_at = by_status.get("queued", (0, 0.0, now))
    queued_audio.set(audio_s or 0.0)
    oldest_queued.set(max(0.0, now - created_at))
