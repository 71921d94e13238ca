"""Take requests in the background as jobs, and keep them for as long as they are wanted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, or_, select
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.jobs.bodies import JobBody, make_body
from asr_server.annexes.jobs.callbacks import Callbacks
from asr_server.annexes.jobs.events import events_response
from asr_server.annexes.jobs.live import Changes
from asr_server.annexes.jobs.measures import measure
from asr_server.annexes.jobs.runner import Runner
from asr_server.annexes.jobs.store import UNFINISHED, Job, Store
from asr_server.api.request import TranscriptionRequest
from asr_server.api.state import SHARE, AppState, caller_of
from asr_server.api.transcribe import recording_for
from asr_server.api.upload import Form
from asr_server.audio.recording import Source
from asr_server.config import naming
from asr_server.errors import InvalidValue, Overloaded, StorageUnavailable

RETRY_S: Final = 600.0  # within which the same request of the same key is the same job
SWEEP_S: Final = 10.0
FULL_RETRY_S: Final = 30.0
MOST_AT_ONCE: Final = 1000  # deleted in one sweep
IDEMPOTENCY_KEY: Final = "idempotency-key"
REPEATED: Final = "idempotent-replayed"

logger = logging.getLogger(__name__)


def owner_of(connection: HTTPConnection) -> str:
    """Return the name of the key that jobs belong to; empty for one without a name."""
    account = caller_of(connection).account
    return account.name if account else ""


class Jobs:
    def __init__(self, state: AppState) -> None:
        self.state, self.settings = state, state.settings.part(JobsSettings)
        self.store = Store(Path(self.settings.jobs_dir))
        self.changes = Changes()
        self.callbacks = Callbacks(self.settings, self.store)
        self.runner = Runner(state, self.store, self.changes, self.callbacks.report)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises StorageUnavailable."""
        await asyncio.to_thread(self.store.open)
        await self.store.requeue()
        await self.store.remove_orphans()
        tasks = [asyncio.create_task(work, name="jobs") for work in (self.runner.run(), self._sweep())]
        try:
            async with self.callbacks.running():
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(StorageUnavailable):
                await self.store.requeue(is_in_order=True)
            await asyncio.to_thread(self.store.close)

    # -- In --

    async def take(self, connection: Request, form: Form, request: TranscriptionRequest) -> Response:
        """Keep the request and its recording; answer once both are on the disk."""
        await self.callbacks.require_allowed(request.fields.callback_url)
        source = await form.upload.source()
        duration_s = await self._look_at(request, source)
        id = f"job_{uuid.uuid4().hex}"
        others = [pair for pair in form.fields if pair[0] != "model"]
        fields = json.dumps([("model", request.fields.model), *others])
        key = connection.headers.get(IDEMPOTENCY_KEY, "")
        async with self.store.keeping(self.store.recording_of(id), source, form.upload.num_bytes) as digest:
            asked = f"{request.options.task} {digest} {fields}"
            job = await self._add(
                owner=owner_of(connection),
                id=id,
                task=request.options.task,
                model=request.fields.model,
                response_format=request.fields.response_format,
                fields=fields,
                metadata=json.dumps(request.fields.metadata),
                idempotency_key=hashlib.sha256(key.encode()).hexdigest() if key else "",
                fingerprint=hashlib.sha256(asked.encode()).hexdigest(),
                num_bytes=form.upload.num_bytes,
                duration_s=duration_s,
                callback_url=request.fields.callback_url,
            )
        if job.id != id:
            await asyncio.to_thread(self.store.recording_of(id).unlink, missing_ok=True)
        self.runner.wake()
        repeated = {REPEATED: "true"} if job.id != id else {}
        headers = {"location": f"/v1/audio/transcriptions/{job.id}"} | repeated
        if request.is_streamed:
            form.close()  # the job has its own file
            return events_response(self.runner, job, 0, headers, with_progress=False)
        return JSONResponse((await self.describe(job)).model_dump(), 202, headers)

    async def _look_at(self, request: TranscriptionRequest, source: Source) -> float | None:
        """Read the beginning: what is no recording is refused at once. Return its length by the header."""
        recording = recording_for(request, source)
        with recording:
            decoded = await self.state.pool.run(recording.next_slice)
            return recording.duration_s if decoded.finished else recording.expected_duration_s

    async def _add(self, **values: Any) -> Job:
        """Return the job, or the one that is the same. Raises Overloaded, InvalidValue."""
        now = time.time()
        row = new_row(now) | values

        def work(connection: Connection) -> Job:
            if same := self.store.jobs_of(connection, *self._same_as(row, now), limit=1):
                if same[0].fingerprint != row["fingerprint"]:
                    raise InvalidValue("The Idempotency-Key was sent before with another request.")
                return same[0]
            self.require_room(connection, row["owner"], 1, row["num_bytes"], row["duration_s"] or 0.0)
            connection.execute(self.store.table("jobs").insert().values(row))
            return self.store.job_of(connection, row["owner"], row["id"])

        return await self.store.run(work)

    def _same_as(self, row: dict[str, Any], now: float) -> list[ColumnElement[bool]]:
        """Match a job that the client has asked for already: clients repeat a POST after a lost reply."""
        jobs, key = self.store.table("jobs"), row["idempotency_key"]
        conditions = [
            jobs.c.owner == row["owner"],
            jobs.c.idempotency_key == key,
            jobs.c.status.not_in(("failed", "cancelled")),
            jobs.c.batch.is_(None),
        ]
        if not key:
            is_recent = jobs.c.created_at.between(now - RETRY_S, now + RETRY_S)
            conditions += [jobs.c.fingerprint == row["fingerprint"], is_recent]
        return conditions

    def require_room(
        self, connection: Connection, owner: str, num_jobs: int, num_bytes: int, audio_s: float = 0.0
    ) -> None:
        """Raises Overloaded. A named key may hold three times what is free, as of the places for requests."""
        jobs, files = self.store.table("jobs"), self.store.table("files")
        is_open = jobs.c.status.in_(UNFINISHED)
        sums = [
            func.coalesce(func.sum(column).filter(is_open), 0)
            for column in (jobs.c.num_bytes, jobs.c.duration_s)
        ]
        amounts = select(func.count(), *sums)
        file_bytes = select(func.coalesce(func.sum(files.c.num_bytes), 0))
        held, own = (
            [
                *connection.execute(amounts.where(*owned_by(jobs))).one(),
                connection.scalar(file_bytes.where(*owned_by(files))),
            ]
            for owned_by in (lambda _: (), lambda table: (table.c.owner == owner,))
        )
        limits = (
            ("max_jobs", num_jobs, held[0], own[0]),
            ("max_jobs_bytes", num_bytes, held[1] + held[3], own[1] + own[3]),
            ("max_jobs_audio_s", audio_s, held[2], own[2]),
        )
        for name, wanted, held_now, own_now in limits:
            free = getattr(self.settings, name) - held_now
            if wanted > free or (owner and own_now + wanted > SHARE * free):
                subject = "This key's share of the" if wanted <= free else "The"
                raise Overloaded(f"{subject} room for jobs is taken: {naming(name)}.", FULL_RETRY_S)

    # -- Out --

    async def describe(self, job: Job) -> JobBody:
        place, jobs = None, self.store.table("jobs")
        if job.status == "queued":
            ahead = select(func.count()).where(jobs.c.status == "queued", jobs.c.number <= job.number)
            place = await self.store.run(lambda connection: connection.scalar(ahead))
        return make_body(job, self.runner.live.get(job.id), place)

    async def page(
        self, owner: str, limit: int, after: str, is_descending: bool
    ) -> tuple[list[JobBody], bool]:
        """Return the jobs behind the one that `after` names, and whether more follow. Raises NotFound."""
        rows, has_more = await self.store.page("jobs", owner, limit, after, is_descending)
        jobs = [Job(**row) for row in rows]
        return [make_body(job, self.runner.live.get(job.id)) for job in jobs], has_more

    async def delete(self, owner: str, id: str) -> None:
        """Cancel a job and delete all of it. Raises NotFound."""
        await self.store.find(owner, id)
        await self.store.delete("jobs", id)  # first, so that it does not start meanwhile
        await self.runner.cancel(id)
        self.changes.notify(id)

    async def _sweep(self) -> None:
        """Count the age of finished jobs by this server's clock, which does not jump, and delete old ones."""
        counted_at = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                await self._delete_old(now - counted_at)
                counted_at = now
                await measure(self.store)
            except StorageUnavailable:
                pass  # the next sweep counts on
            except Exception:
                logger.exception("old jobs could not be deleted")
            await asyncio.sleep(SWEEP_S)

    async def _delete_old(self, elapsed_s: float) -> None:
        """A batch's lines are kept until all are finished, and a batch as long as its lines."""
        settings = self.settings
        jobs, files, batches = map(self.store.table, ("jobs", "files", "batches"))
        open_batches = select(jobs.c.batch).where(jobs.c.status.in_(UNFINISHED), jobs.c.batch.is_not(None))
        is_finished = jobs.c.status.not_in(UNFINISHED) & or_(
            jobs.c.batch.is_(None), jobs.c.batch.not_in(open_batches)
        )
        is_old = or_(jobs.c.age_s > settings.jobs_keep_s, jobs.c.read_age_s > settings.jobs_keep_read_s)
        is_left = batches.c.id.not_in(select(jobs.c.batch).where(jobs.c.batch.is_not(None)))

        def work(connection: Connection) -> tuple[list[str], list[str]]:
            for table, ages in ((jobs, is_finished), (files, files.c.number > 0), (batches, is_left)):
                connection.execute(table.update().where(ages).values(age_s=table.c.age_s + elapsed_s))
            read_age = jobs.update().where(is_finished).values(read_age_s=jobs.c.read_age_s + elapsed_s)
            connection.execute(read_age)
            connection.execute(batches.delete().where(is_left, batches.c.age_s > settings.jobs_keep_s))
            old_jobs = select(jobs.c.id).where(is_finished, is_old).limit(MOST_AT_ONCE)
            old_files = select(files.c.id).where(files.c.age_s > settings.jobs_keep_s).limit(MOST_AT_ONCE)
            return list(connection.scalars(old_jobs)), list(connection.scalars(old_files))

        old_jobs, old_files = await self.store.run(work)
        await self.store.delete("jobs", *old_jobs)
        await self.store.delete("files", *old_files)
        for id in old_jobs:
            self.changes.notify(id)


def new_row(now: float) -> dict[str, Any]:
    return {
        "status": "queued",
        "created_at": now,
        "metadata": "{}",
        "idempotency_key": "",
        "fingerprint": "",
        "callback_url": "",
    }
