"""Delete what is old, and measure what is left, every few seconds."""

import asyncio
import logging
import time
from typing import Final

from prometheus_client import Gauge
from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.jobs.live import Changes
from asr_server.annexes.jobs.rows import STATUSES, UNFINISHED, Batch, Clock, File, Job
from asr_server.annexes.jobs.store import Store
from asr_server.errors import StorageUnavailable
from asr_server.metrics import REGISTRY

SWEEP_S: Final = 10.0
MOST_AT_ONCE: Final = 1000  # jobs deleted in one sweep

jobs_kept: Final = Gauge("asr_jobs", "Jobs kept, by status.", ("status",), registry=REGISTRY)
queued_audio: Final = Gauge(
    "asr_jobs_queued_audio_seconds", "Audio of queued jobs, where their headers say.", registry=REGISTRY
)
oldest_queued: Final = Gauge(
    "asr_jobs_oldest_queued_seconds", "Age of the oldest queued job.", registry=REGISTRY
)

logger = logging.getLogger(__name__)


async def keep_sweeping(store: Store, settings: JobsSettings, changes: Changes) -> None:
    while True:
        try:
            for id in await store.run(_delete_old, settings, store.clock_s):
                changes.notify(id)
            await store.collect()
            await store.run(_measure)
        except StorageUnavailable:
            pass  # the next sweep goes on
        except Exception:
            logger.exception("old jobs could not be deleted")
        await asyncio.sleep(SWEEP_S)


def _delete_old(session: Session, settings: JobsSettings, clock_s: float) -> list[str]:
    """Return the ids of jobs that are gone. A batch is kept whole, until it is old itself."""
    session.merge(Clock(number=1, clock_s=clock_s))
    has_open_line = select(Job.batch).where(Job.status.in_(UNFINISHED), Job.batch.is_not(None))
    is_single = Job.batch.is_(None)
    old_s = clock_s - settings.jobs_keep_s
    for kind, has_ended in (
        (Job, is_single & Job.status.not_in(UNFINISHED)),
        (Batch, Batch.id.not_in(has_open_line)),
        (File, File.is_listed),
    ):
        is_new = kind.ended_clock_s.is_(None) & has_ended
        session.execute(update(kind).where(is_new).values(ended_clock_s=clock_s))
    is_old = or_(Job.ended_clock_s < old_s, Job.read_clock_s < clock_s - settings.jobs_keep_read_s)
    old = select(Job.number).where(is_single, is_old).limit(MOST_AT_ONCE)
    session.execute(delete(Batch).where(Batch.ended_clock_s < old_s))
    session.execute(update(File).where(File.ended_clock_s < old_s).values(is_listed=False))
    return list(session.scalars(delete(Job).where(Job.number.in_(old)).returning(Job.id)))


def _measure(session: Session) -> None:
    by_status = dict(session.execute(select(Job.status, func.count()).group_by(Job.status)).all())
    for status in STATUSES:
        jobs_kept.labels(status).set(by_status.get(status, 0))
    queued = select(func.sum(Job.duration_s), func.min(Job.created_at)).where(Job.status == "queued")
    audio_s, created_at = session.execute(queued).one()
    queued_audio.set(audio_s or 0.0)
    oldest_queued.set(max(0.0, time.time() - created_at) if created_at else 0.0)
