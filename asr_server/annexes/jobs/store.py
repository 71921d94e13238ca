"""Keep jobs through the end of the server: SQLite, and each recording as a file beside it.

One thread reads and writes; each call is one transaction. The migrations alone say which columns there are.
Another database needs another URL here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    RowMapping,
    Select,
    Table,
    create_engine,
    event,
    func,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from asr_server.audio.recording import Source, open_source
from asr_server.config import MIB
from asr_server.errors import NotFound, StorageUnavailable

UNFINISHED: Final = ("queued", "in_progress")
STATUSES: Final = (*UNFINISHED, "completed", "failed", "cancelled", "incomplete")
FREE_SHARE: Final = 20  # a twentieth of the disk is left free
_PRAGMAS: Final = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A row of `jobs` without `fields`, which may have megabytes. Times are Unix seconds."""

    number: int
    id: str
    owner: str
    task: str
    model: str
    response_format: str
    metadata: str
    idempotency_key: str
    fingerprint: str
    status: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    num_bytes: int
    duration_s: float | None
    error: str | None
    num_starts: int
    age_s: float
    read_age_s: float | None
    callback_url: str
    callbacks: str
    callback_state: str | None
    batch: str | None
    custom_id: str | None

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED


@dataclass(frozen=True)
class Content:
    """The reply that the endpoint would have made, and its events as pairs of end in the text and bytes."""

    status_code: int
    headers: str
    body: bytes
    events: bytes


_CONTENT_COLUMNS: Final = tuple(field.name for field in fields(Content))


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recordings, self.uploads = folder / "recordings", folder / "files"
        self._database = folder / "jobs.sqlite"
        self._tables: dict[str, Table] = {}
        self._inode = 0
        self._engine: Engine | None = None
        self._lock: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asr-jobs")

    def open(self) -> None:
        """Raises StorageUnavailable: no folder, a broken database, or another server that has it."""
        try:
            for folder in (self.folder, self.recordings, self.uploads):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._open_database()
        except (SQLAlchemyError, OSError) as error:
            self.close()
            raise StorageUnavailable(f"{self.folder} keeps no jobs: {_reason(error)}") from error

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError("another server uses it") from None

    def _open_database(self) -> None:
        self._close_database()
        self._engine = create_engine(f"sqlite:///{self._database}")
        event.listen(self._engine, "connect", _set_pragmas)
        config = Config()
        config.set_main_option(
            "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
        )
        with self._engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            tables = MetaData()
            tables.reflect(connection)
        self._tables = dict(tables.tables)
        self._inode = self._database.stat().st_ino

    def _close_database(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def close(self) -> None:
        self._thread.shutdown()
        self._close_database()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- Transactions --

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Do the work in one transaction. Raises StorageUnavailable, and what it raises itself."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[Connection], T]) -> T:
        try:
            if self._database.stat().st_ino != self._inode:  # another file took its place
                self._open_database()
            assert self._engine is not None
            with self._engine.begin() as connection:
                return work(connection)
        except (SQLAlchemyError, OSError) as error:
            logger.error("the jobs in %s cannot be reached: %s", self.folder, _reason(error))
            raise StorageUnavailable("The server cannot reach the jobs that it keeps.") from error

    def table(self, name: str) -> Table:
        return self._tables[name]

    # -- Rows --

    def _select(self, table: Table) -> Select[Any]:
        return select(*(column for column in table.c if column.name != "fields"))

    async def fields_of(self, job: Job) -> list[tuple[str, str]]:
        jobs = self.table("jobs")
        query = select(jobs.c.fields).where(jobs.c.number == job.number)
        pairs = await self.run(lambda connection: connection.scalar(query))
        return [(name, value) for name, value in json.loads(pairs or "[]")]

    async def row(self, name: str, owner: str, id: str) -> RowMapping:
        """Raises NotFound: it is not this key's, or deleted."""
        return await self.run(lambda connection: self._row(connection, name, owner, id))

    def _row(self, connection: Connection, name: str, owner: str, id: str) -> RowMapping:
        table = self.table(name)
        query = self._select(table).where(table.c.id == id, table.c.owner == owner)
        if (row := connection.execute(query).mappings().first()) is None:
            raise NotFound(f"There is no '{id[:80]}': it was deleted, or is another key's.")
        return row

    async def page(
        self, name: str, owner: str, limit: int, after: str, is_descending: bool
    ) -> tuple[list[RowMapping], bool]:
        """Return the rows behind the one that `after` names, and whether more follow. Raises NotFound."""
        table = self.table(name)
        query = self._select(table).where(table.c.owner == owner).limit(limit + 1)
        query = query.order_by(table.c.number.desc() if is_descending else table.c.number)

        def work(connection: Connection) -> list[RowMapping]:
            own = query
            if after:
                number = self._row(connection, name, owner, after)["number"]
                own = query.where(table.c.number < number if is_descending else table.c.number > number)
            return list(connection.execute(own).mappings())

        rows = await self.run(work)
        return rows[:limit], len(rows) > limit

    async def delete(self, name: str, *ids: str) -> None:
        """Delete jobs or files, with what they have on the disk."""
        table, folder = self.table(name), self.recordings if name == "jobs" else self.uploads
        if ids:
            await self.run(lambda connection: connection.execute(table.delete().where(table.c.id.in_(ids))))
        for id in ids:
            await asyncio.to_thread((folder / id).unlink, missing_ok=True)

    async def find(self, owner: str, id: str) -> Job:
        """Raises NotFound."""
        return Job(**await self.row("jobs", owner, id))

    def job_of(self, connection: Connection, owner: str, id: str) -> Job:
        return Job(**self._row(connection, "jobs", owner, id))

    def jobs_of(self, connection: Connection, *conditions: Any, limit: int | None = None) -> list[Job]:
        """Return the oldest jobs that meet all of this."""
        jobs = self.table("jobs")
        query = self._select(jobs).where(*conditions).order_by(jobs.c.number).limit(limit)
        return [Job(**row) for row in connection.execute(query).mappings()]

    async def update(self, number: int, **values: Any) -> None:
        jobs = self.table("jobs")
        await self.run(lambda each: each.execute(jobs.update().where(jobs.c.number == number).values(values)))

    async def mark_read(self, *read: Job) -> None:
        jobs, unread = self.table("jobs"), [job.number for job in read if job.read_age_s is None]
        if unread:
            change = jobs.update().where(jobs.c.number.in_(unread)).values(read_age_s=0.0)
            await self.run(lambda connection: connection.execute(change))

    async def requeue(self, is_in_order: bool = False) -> None:
        """Queue again what ran when a server ended; an end in order is no fault of the job."""
        jobs = self.table("jobs")
        values = {"status": "queued", "num_starts": jobs.c.num_starts - int(is_in_order)}
        change = jobs.update().where(jobs.c.status == "in_progress").values(values)
        await self.run(lambda connection: connection.execute(change))

    async def start_next(self, num_running: Counter[str], now: float) -> Job | None:
        """Take the oldest queued job of the key with the fewest that run."""
        jobs = self.table("jobs")

        def work(connection: Connection) -> Job | None:
            first = select(jobs.c.owner, func.min(jobs.c.number)).where(jobs.c.status == "queued")
            waiting = connection.execute(first.group_by(jobs.c.owner)).all()
            if not waiting:
                return None
            _, number = min(waiting, key=lambda row: (num_running[row[0]], row[1]))
            change = {"status": "in_progress", "started_at": now, "num_starts": jobs.c.num_starts + 1}
            connection.execute(jobs.update().where(jobs.c.number == number).values(change))
            return self.jobs_of(connection, jobs.c.number == number)[0]

        return await self.run(work)

    async def finish(self, job: Job, content: Content, **values: Any) -> None:
        jobs, contents, results = map(self.table, ("jobs", "contents", "results"))

        def work(connection: Connection) -> None:
            is_running = (jobs.c.number == job.number, jobs.c.status == "in_progress")
            change = jobs.update().where(*is_running).values(values)
            if connection.execute(change).rowcount:  # else it was cancelled or deleted meanwhile
                connection.execute(contents.insert().values(job=job.number, **vars(content)))
                connection.execute(results.delete().where(results.c.job == job.number))

        await self.run(work)
        await asyncio.to_thread(self.recording_of(job.id).unlink, missing_ok=True)

    async def content_of(self, job: Job) -> Content:
        """Raises NotFound while it is not finished."""
        contents = self.table("contents")
        columns = [contents.c[name] for name in _CONTENT_COLUMNS]
        query = select(*columns).where(contents.c.job == job.number)
        row = await self.run(lambda connection: connection.execute(query).first())
        if row is None:
            raise NotFound(f"The job '{job.id}' is {job.status}: it has no content.")
        return Content(*row)

    # -- Results of the engine --

    async def results_of(self, job: Job) -> dict[tuple[int, int], bytes]:
        """Return each kept result, by chunk and part."""
        results = self.table("results")
        query = select(results.c.chunk, results.c.part, results.c.data).where(results.c.job == job.number)
        rows = await self.run(lambda connection: connection.execute(query).all())
        return {(chunk, part): data for chunk, part, data in rows}

    async def keep_result(self, job: Job, chunk: int, part: int, data: bytes) -> None:
        jobs, results = self.table("jobs"), self.table("results")

        def work(connection: Connection) -> None:
            key = (results.c.job == job.number, results.c.chunk == chunk, results.c.part == part)
            connection.execute(results.delete().where(*key))
            if connection.execute(
                jobs.update().where(jobs.c.number == job.number).values(num_starts=0)
            ).rowcount:
                connection.execute(results.insert().values(job=job.number, chunk=chunk, part=part, data=data))

        await self.run(work)

    # -- Files --

    def recording_of(self, id: str) -> Path:
        return self.recordings / id

    def upload_of(self, id: str) -> Path:
        return self.uploads / id

    def require_disk(self, num_bytes: int) -> None:
        """Raises StorageUnavailable: the disk would be full, or the folder is gone."""
        with storing():
            disk = shutil.disk_usage(self.recordings)
        if num_bytes > disk.free - disk.total // FREE_SHARE:
            raise StorageUnavailable("The disk of the server's jobs is full. Try again later.")

    @asynccontextmanager
    async def keeping(self, path: Path, source: Source, num_bytes: int) -> AsyncIterator[str]:
        """Copy a file for good, unless the block fails; yield its digest. Raises StorageUnavailable."""
        self.require_disk(num_bytes)
        try:
            with storing():
                digest = await asyncio.to_thread(copy_to, path, source)
            yield digest
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def remove_orphans(self) -> None:
        """Remove files without a row."""
        for folder, name in ((self.recordings, "jobs"), (self.uploads, "files")):
            table = self.table(name)
            known = await self.run(lambda each, ids=table.c.id: {*each.scalars(select(ids))})  # type: ignore[misc]
            for path in await asyncio.to_thread(lambda folder=folder: [*folder.iterdir()]):  # type: ignore[misc]
                if path.name not in known:
                    await asyncio.to_thread(path.unlink, missing_ok=True)


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


def copy_to(path: Path, source: Source) -> str:
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
