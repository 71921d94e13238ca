"""Keep rows and files through the end of the server: SQLite, and a folder beside it. Sweep out what is old.

One thread reads and writes, and each `run` is one transaction.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from filelock import FileLock, Timeout
from prometheus_client import Gauge
from sqlalchemy import Connection, create_engine, delete, event, func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.jobs.rows import STATUSES, UNFINISHED, Batch, Clock, Content, File, Job, Kept, Row
from asr_server.annexes.jobs.views import Changes
from asr_server.api.upload import free_bytes
from asr_server.audio.recording import Source, open_source
from asr_server.config import MIB
from asr_server.errors import NotFound, StorageUnavailable
from asr_server.metrics import REGISTRY

VERSION: Final = 1  # of the tables; 0 has the same ones
_PRAGMAS: Final = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K", bound=Kept)


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, folder / "files"
        self._database = folder / "jobs.sqlite"
        self._inode = 0
        self._engine = create_engine(f"sqlite:///{self._database}")
        event.listen(self._engine, "connect", _set_pragmas)
        self._lock = FileLock(folder / "lock", mode=0o600, thread_local=False)
        self._clock_began_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asr-jobs")

    def open(self) -> None:
        """Raises StorageUnavailable: no folder, a broken database, or another server that has it."""
        try:
            self.files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
            self._open_database()
        except Timeout as error:
            raise StorageUnavailable(f"{self.folder} keeps no jobs: another server uses it") from error
        except (SQLAlchemyError, OSError) as error:
            self.close()
            raise StorageUnavailable(f"{self.folder} keeps no jobs: {_reason(error)}") from error

    def _open_database(self) -> None:
        self._engine.dispose()
        with self._engine.begin() as connection:
            _bring_up_to_date(connection)
            clock_s = connection.scalar(select(Clock.clock_s)) or 0.0
        self._clock_began_at = time.monotonic() - clock_s
        self._inode = self._database.stat().st_ino

    def close(self) -> None:
        self._thread.shutdown()
        self._engine.dispose()
        self._lock.release()

    @property
    def clock_s(self) -> float:
        """Seconds that servers ran with this folder, as far as the sweep has stored them."""
        return time.monotonic() - self._clock_began_at

    # -- Rows --

    async def run(self, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work in one transaction. Raises StorageUnavailable, and what it raises itself."""
        loop, bound = asyncio.get_running_loop(), lambda session: work(session, *args, **kwargs)
        return await loop.run_in_executor(self._thread, self._transaction, bound)

    def _transaction(self, work: Callable[[Session], T]) -> T:
        try:
            if self._database.stat().st_ino != self._inode:  # another file took its place
                self._open_database()
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                return work(session)
        except (SQLAlchemyError, OSError) as error:
            logger.error("the jobs in %s cannot be reached: %s", self.folder, _reason(error))
            raise StorageUnavailable("The server cannot reach the jobs that it keeps.") from error

    # -- Files --

    @asynccontextmanager
    async def keeping(self, id: str, source: Source, num_bytes: int) -> AsyncIterator[str]:
        """Copy a file for good, unless the block fails; yield its digest. Raises StorageUnavailable.

        The block stores the row. Who cancels it cannot know whether that was done: the file stays.
        """
        try:
            with storing():
                if num_bytes > free_bytes(self.files):
                    raise StorageUnavailable("The disk of the server's jobs is full. Try again later.")
                digest = await asyncio.to_thread(_copy, self.files / id, source)
            yield digest
        except Exception:
            await self.remove([id])
            raise

    async def collect(self, *ids: str) -> None:
        """Remove what nobody sees and no job needs any more: of these files, or of all."""
        await self.remove(await self.run(_collect, ids))

    async def remove(self, ids: list[str]) -> None:
        for id in ids:
            with contextlib.suppress(OSError):  # the next start removes what has no row
                await asyncio.to_thread((self.files / id).unlink)

    async def remove_orphans(self) -> None:
        """Remove files without a row."""
        known = await self.run(lambda session: set(session.scalars(select(File.id))))
        found = await asyncio.to_thread(os.listdir, self.files)
        await self.remove([name for name in found if name not in known])


def _bring_up_to_date(connection: Connection) -> None:
    """Make the tables if they are not there. Raises OSError for those of a newer version of the server."""
    version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version > VERSION:
        raise OSError("it is of a newer version of the server")
    if version < VERSION:
        Row.metadata.create_all(connection)
        connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")


def find(session: Session, kind: type[K], owner: str, id: str) -> K:
    """Raises NotFound: it is not this key's, or deleted."""
    query = select(kind).where(kind.id == id, kind.owner == owner, kind.is_listed)
    if (row := session.scalar(query)) is None:
        raise NotFound(f"There is no '{id[:80]}': it was deleted, or is another key's.")
    return row


def page(
    session: Session, kind: type[K], owner: str, limit: int, after: str, is_descending: bool
) -> tuple[list[K], dict[str, Any]]:
    """Return the rows behind the one that `after` names, and what a list says of them. Raises NotFound."""
    query = select(kind).where(kind.owner == owner, kind.is_listed).limit(limit + 1)
    query = query.order_by(kind.number.desc() if is_descending else kind.number)
    if after:
        number = find(session, kind, owner, after).number
        query = query.where(kind.number < number if is_descending else kind.number > number)
    found = list(session.scalars(query))
    rows, has_more = found[:limit], len(found) > limit
    first_id, last_id = (rows[0].id, rows[-1].id) if rows else (None, None)
    return rows, {"first_id": first_id, "last_id": last_id, "has_more": has_more}


def read_content(session: Session, job: Job, clock_s: float) -> Content:
    """Return what a client now reads. Raises NotFound while the job is not finished."""
    if (content := session.get(Content, job.number)) is None:
        raise NotFound(f"The job '{job.id}' is {job.status}: it has no content.")
    is_unread = (Job.number == job.number, Job.read_clock_s.is_(None))
    session.execute(update(Job).where(*is_unread).values(read_clock_s=clock_s))
    return content


def _collect(session: Session, ids: tuple[str, ...]) -> list[str]:
    is_needed = select(Job.id).where(Job.file == File.id, Job.status.in_(UNFINISHED)).exists()
    gone = delete(File).where(File.is_listed.is_(False), ~is_needed)
    return list(session.scalars((gone.where(File.id.in_(ids)) if ids else gone).returning(File.id)))


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Raises StorageUnavailable for an OSError."""
    try:
        yield
    except OSError as error:
        logger.error("a job cannot be stored: %s", error)
        raise StorageUnavailable(f"The server cannot store the job: {error.strerror or error}.") from error


def _set_pragmas(connection: Any, _: object) -> None:
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _reason(error: Exception) -> str:
    """Return the database's own words, without the statement."""
    return str(getattr(error, "orig", None) or error)


def _copy(path: Path, source: Source) -> str:
    """Copy a file to the disk for good. Return the digest of its bytes."""
    digest = hashlib.sha256()
    with open_source(source) as reader, open(path, "xb") as writer:
        while data := reader.read(MIB):
            digest.update(data)
            writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return digest.hexdigest()


# -- The sweep, every few seconds ----------------------------------------------------------------------------

SWEEP_S: Final = 10.0
MOST_AT_ONCE: Final = 1000  # jobs deleted in one sweep

jobs_kept: Final = Gauge("asr_jobs", "Jobs kept, by status.", ("status",), registry=REGISTRY)
queued_audio: Final = Gauge(
    "asr_jobs_queued_audio_seconds", "Audio of queued jobs, where their headers say.", registry=REGISTRY
)
oldest_queued: Final = Gauge(
    "asr_jobs_oldest_queued_seconds", "Age of the oldest queued job.", registry=REGISTRY
)


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
