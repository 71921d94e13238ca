"""Take requests in the background as jobs, and keep them for as long as they are wanted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
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
from asr_server.annexes.jobs.runner import Runner
from asr_server.annexes.jobs.store import UNFINISHED, Job, Store, storing
from asr_server.api.request import TranscriptionRequest
from asr_server.api.state import SHARE, AppState, caller_of
from asr_server.api.transcribe import recording_for
from asr_server.api.upload import Form
from asr_server.audio.recording import Source, open_source
from asr_server.config import MIB, naming
from asr_server.errors import InvalidValue, Overloaded

RETRY_S: Final = 600.0  # within which the same request of the same key is the same job
SWEEP_S: Final = 10.0
FULL_RETRY_S: Final = 30.0
IDEMPOTENCY_KEY: Final = "idempotency-key"
REPEATED: Final = "idempotent-replayed"


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
        self.runner = Runner(state, self.store, self.changes, self.callbacks.wake)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises StorageUnavailable."""
        await asyncio.to_thread(self.store.open)
        await self.store.requeue()
        await self.store.remove_orphans()
        works = [
            self.runner.run(),
            self._sweep(),
            *([self.callbacks.run()] if self.settings.callback_hosts else []),
        ]
        tasks = [asyncio.create_task(work, name="jobs") for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.store.close)

    # -- In --

    async def take(self, connection: Request, form: Form, request: TranscriptionRequest) -> Response:
        """Keep the request and its recording; answer once both are on the disk."""
        await self.callbacks.require_allowed(request.fields.callback_url)
        source = await form.upload.source()
        duration_s = await self._look_at(request, source)
        id = f"job_{uuid.uuid4().hex}"
        path = self.store.recording_of(id)
        self.store.require_disk(form.upload.num_bytes)
        others = [pair for pair in form.fields if pair[0] != "model"]
        pairs = [("model", request.fields.model), *others]
        is_kept = False
        try:
            with storing():
                digest = await asyncio.to_thread(copy_to, path, source)
            key = connection.headers.get(IDEMPOTENCY_KEY, "")
            asked = json.dumps([request.options.task, pairs, digest])
            job, is_kept = await self.add(
                owner=owner_of(connection),
                id=id,
                task=request.options.task,
                fields=json.dumps(pairs),
                metadata=json.dumps(request.fields.metadata),
                idempotency_key=hashlib.sha256(key.encode()).hexdigest() if key else "",
                fingerprint=hashlib.sha256(asked.encode()).hexdigest(),
                num_bytes=form.upload.num_bytes,
                duration_s=duration_s,
                callback_url=request.fields.callback_url,
            )
        finally:
            if not is_kept:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        self.runner.wake()
        headers = {"location": f"/v1/audio/transcriptions/{job.id}"} | ({} if is_kept else {REPEATED: "true"})
        if request.is_streamed:
            return events_response(self.runner, job, 0, headers, with_progress=False)
        return JSONResponse((await self.describe(job)).model_dump(), 202, headers)

    async def _look_at(self, request: TranscriptionRequest, source: Source) -> float | None:
        """Read the beginning: what is no recording is refused at once. Return its length by the header."""
        recording = recording_for(request, source)
        with recording:
            decoded = await self.state.pool.run(recording.next_slice)
            return recording.duration_s if decoded.finished else recording.expected_duration_s

    async def add(self, **values: Any) -> tuple[Job, bool]:
        """Return the job and whether it is new. Raises Overloaded, InvalidValue."""
        jobs = self.store.table("jobs")
        now = time.time()
        row: dict[str, Any] = {"status": "queued", "created_at": now, "callback_state": None} | values

        def work(connection: Connection) -> tuple[Job, bool]:
            conditions = self._same_as(row, now)
            if same := self.store.jobs_of(connection, *conditions, limit=1):
                if same[0].fingerprint != row["fingerprint"]:
                    raise InvalidValue("The Idempotency-Key was sent before with another request.")
                return same[0], False
            self._require_room(connection, row)
            connection.execute(jobs.insert().values(row))
            return self.store.job_of(connection, row["owner"], row["id"]), True

        return await self.store.run(work)

    def _same_as(self, row: dict[str, Any], now: float) -> list[ColumnElement[bool]]:
        """Match a job that the client has asked for already: clients repeat a POST whose reply was lost."""
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

    def _require_room(self, connection: Connection, row: dict[str, Any]) -> None:
        """Raises Overloaded. A named key may hold three times what is free, as of the places for requests."""
        settings, jobs = self.settings, self.store.table("jobs")
        is_open = jobs.c.status.in_(UNFINISHED)
        limits = (
            ("max_jobs", settings.max_jobs, func.count(), 1, jobs.c.number > 0),
            (
                "max_jobs_bytes",
                settings.max_jobs_bytes,
                func.sum(jobs.c.num_bytes),
                row["num_bytes"],
                is_open,
            ),
            (
                "max_jobs_audio_s",
                settings.max_jobs_audio_s,
                func.sum(jobs.c.duration_s),
                row["duration_s"] or 0.0,
                is_open,
            ),
        )
        for name, limit, amount, wanted, counts in limits:
            held = connection.scalar(select(amount).where(counts)) or 0
            own = connection.scalar(select(amount).where(counts, jobs.c.owner == row["owner"])) or 0
            free = limit - held
            if wanted > free or (row["owner"] and own + wanted > SHARE * free):
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
        jobs = self.store.table("jobs")

        def work(connection: Connection) -> list[Job]:
            conditions = [jobs.c.owner == owner]
            if after:
                number = self.store.job_of(connection, owner, after).number
                conditions.append(jobs.c.number < number if is_descending else jobs.c.number > number)
            order = jobs.c.number.desc() if is_descending else jobs.c.number
            return self.store.jobs_of(connection, *conditions, order=order, limit=limit + 1)

        found = await self.store.run(work)
        return [make_body(job, self.runner.live.get(job.id)) for job in found[:limit]], len(found) > limit

    async def delete(self, owner: str, id: str) -> None:
        """Cancel a job and delete all of it. Raises NotFound."""
        await self.store.find(owner, id)
        await self.runner.cancel(id)
        await self.store.delete(id)
        self.changes.notify(id)

    async def _sweep(self) -> None:
        """Count the age of finished jobs by this server's clock, which does not jump, and delete old ones."""
        counted_at = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            with contextlib.suppress(Exception):  # logged; the next sweep counts on
                await self._delete_old(now - counted_at)
                counted_at = now

    async def _delete_old(self, elapsed_s: float) -> None:
        settings, jobs = self.settings, self.store.table("jobs")

        def work(connection: Connection) -> list[str]:
            is_finished = jobs.c.status.not_in(UNFINISHED)
            age = {"age_s": jobs.c.age_s + elapsed_s, "read_age_s": jobs.c.read_age_s + elapsed_s}
            connection.execute(jobs.update().where(is_finished).values(age))
            is_old = or_(jobs.c.age_s > settings.jobs_keep_s, jobs.c.read_age_s > settings.jobs_keep_read_s)
            return list(connection.scalars(select(jobs.c.id).where(is_finished, is_old)))

        if old := await self.store.run(work):
            await self.store.delete(*old)


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
