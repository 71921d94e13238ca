"""Take requests in the background as jobs, and keep them for as long as they are wanted."""

import asyncio
import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import sqlalchemy
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.jobs.callbacks import Callbacks
from asr_server.annexes.jobs.rows import UNFINISHED, Batch, File, Job, Kept
from asr_server.annexes.jobs.runner import Runner, requeue
from asr_server.annexes.jobs.store import Store, find, keep_sweeping, read_content
from asr_server.annexes.jobs.views import Changes, JobBody, JobEvent, events_after, is_set_within, make_body
from asr_server.api.errors import body_of
from asr_server.api.events import HEADERS, event
from asr_server.api.request import TranscriptionRequest
from asr_server.api.state import SHARE, AppState, caller_of
from asr_server.api.transcribe import recording_for
from asr_server.api.upload import Form
from asr_server.audio.recording import Source
from asr_server.config import naming
from asr_server.errors import InvalidValue, Overloaded, ReportedError, StorageUnavailable

RETRY_S: Final = 600.0  # within which the same request of the same key is the same job
FULL_RETRY_S: Final = 30.0
IDEMPOTENCY_KEY: Final = "idempotency-key"
REPEATED: Final = "idempotent-replayed"
PING_S: Final = 15.0  # proxies close a connection that is silent for long


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
        await self.store.run(requeue)
        await self.store.remove_orphans()
        sweeping = keep_sweeping(self.store, self.settings, self.changes)
        tasks = [asyncio.create_task(work, name="jobs") for work in (self.runner.run(), sweeping)]
        try:
            async with self.callbacks.running():
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(StorageUnavailable):
                await self.store.run(requeue, is_in_order=True)
            await asyncio.to_thread(self.store.close)

    async def take(self, connection: Request, form: Form, request: TranscriptionRequest) -> Response:
        """Keep the request and its recording; answer once both are on the disk."""
        await self.callbacks.require_allowed(request.fields.callback_url)
        source, num_bytes = await form.upload.source(), form.upload.num_bytes
        duration_s = await self._look_at(request, source)
        fields = [("model", request.fields.model), *(pair for pair in form.fields if pair[0] != "model")]
        key = connection.headers.get(IDEMPOTENCY_KEY, "")
        file = File(
            id=f"file-{uuid.uuid4().hex}",
            owner=owner_of(connection),
            is_listed=False,
            purpose="user_data",
            filename=form.sent_name,
            num_bytes=num_bytes,
        )
        async with self.store.keeping(file.id, source, num_bytes) as digest:
            asked = f"{request.options.task} {digest} {json.dumps(fields)}"
            new = Job(
                id=f"job_{uuid.uuid4().hex}",
                owner=file.owner,
                file=file.id,
                task=request.options.task,
                model=request.fields.model,
                response_format=request.fields.response_format,
                fields=fields,
                labels=request.fields.metadata,
                idempotency_key=hashlib.sha256(key.encode()).hexdigest() if key else "",
                fingerprint=hashlib.sha256(asked.encode()).hexdigest(),
                duration_s=duration_s,
                callback_url=request.fields.callback_url,
            )
            job = await self.store.run(self._add, new, file)
        headers = {"location": f"/v1/audio/transcriptions/{job.id}"}
        if job is not new:
            headers[REPEATED] = "true"
            await self.store.remove([file.id])
        self.runner.wake()
        if request.is_streamed:
            return events_response(self.runner, job, 0, headers, with_progress=False)
        return JSONResponse((await self.describe(job)).model_dump(), 202, headers)

    async def _look_at(self, request: TranscriptionRequest, source: Source) -> float | None:
        """Read the beginning: what is no recording is refused at once. Return its length by the header."""
        with recording_for(request, source) as recording:
            decoded = await self.state.pool.run(recording.next_slice)
            return recording.duration_s if decoded.finished else recording.expected_duration_s

    def _add(self, session: Session, job: Job, file: File) -> Job:
        """Return the job, or the one that is the same. Raises Overloaded, InvalidValue."""
        if (same := _same_as(session, job)) is not None:
            if same.fingerprint != job.fingerprint:
                raise InvalidValue("The Idempotency-Key was sent before with another request.")
            return same
        self.add(session, file, job)
        return job

    def add(self, session: Session, *rows: Kept) -> None:
        """Store rows of one key, the first before the others. Raises Overloaded."""
        owner = rows[0].owner
        held, own, wanted = _held(session), _held(session, owner), _amounts(rows)
        for name, amount in wanted.items():
            free = getattr(self.settings, name) - held[name]
            if amount > free or (owner and own[name] + amount > SHARE * free):
                subject = "This key's share of the" if amount <= free else "The"
                raise Overloaded(f"{subject} room for jobs is taken: {naming(name)}.", FULL_RETRY_S)
        session.add(rows[0])
        session.flush()
        session.add_all(rows[1:])

    async def describe(self, job: Job) -> JobBody:
        ahead = select(func.count()).where(Job.status == "queued", Job.number <= job.number)
        place = None
        if job.status == "queued":
            place = await self.store.run(lambda session: session.scalar(ahead))
        return make_body(job, self.runner.live.get(job.id), place)

    async def delete(self, owner: str, id: str) -> None:
        """Cancel a job and delete all of it. Raises NotFound."""
        job = await self.store.run(find, Job, owner, id)
        await self.store.run(lambda session: session.execute(delete(Job).where(Job.number == job.number)))
        await self.end(id)  # behind, so that it does not start meanwhile

    async def end(self, *ids: str) -> None:
        """End jobs that were deleted or cancelled in the store."""
        for id in ids:
            await self.runner.cancel(id)
            self.changes.notify(id)
        await self.store.collect()


def _same_as(session: Session, job: Job) -> Job | None:
    """Return what the client has asked for already: clients repeat a POST after a lost reply."""
    now = time.time()
    if job.idempotency_key:
        conditions = [Job.idempotency_key == job.idempotency_key]
    else:
        is_recent = Job.created_at.between(now - RETRY_S, now + RETRY_S)
        conditions = [Job.idempotency_key == "", Job.fingerprint == job.fingerprint, is_recent]
    is_own = (Job.owner == job.owner, Job.batch.is_(None), Job.status.not_in(("failed", "cancelled")))
    return session.scalar(select(Job).where(*is_own, *conditions).order_by(Job.number).limit(1))


def _amounts(rows: Sequence[Kept]) -> dict[str, float]:
    """Return how much of each limit new rows take."""
    return {
        "max_jobs": sum(row.is_listed is not False for row in rows),
        "max_jobs_bytes": sum(row.num_bytes for row in rows if isinstance(row, File)),
        "max_jobs_audio_s": sum(row.duration_s or 0.0 for row in rows if isinstance(row, Job)),
    }


def _held(session: Session, owner: str | None = None) -> dict[str, float]:
    """Return how much of each limit is taken, by all or by one key."""

    def total(kind: type[Kept], what: Any, is_counted: Any) -> float:
        is_own = sqlalchemy.true() if owner is None else kind.owner == owner
        return session.scalar(select(what).select_from(kind).where(is_own, is_counted)) or 0.0

    num_rows = [total(kind, func.count(), kind.is_listed) for kind in (Job, File, Batch)]
    return {
        "max_jobs": sum(num_rows),
        "max_jobs_bytes": total(File, func.sum(File.num_bytes), sqlalchemy.true()),
        "max_jobs_audio_s": total(Job, func.sum(Job.duration_s), Job.status.in_(UNFINISHED)),
    }


def events_response(
    runner: Runner, job: Job, last_id: int, headers: Mapping[str, str], with_progress: bool
) -> StreamingResponse:
    """Stream its text as the endpoint's stream does, from the start or from where a client left it."""
    return StreamingResponse(_events(runner, job, last_id, with_progress), headers={**HEADERS, **headers})


async def _events(runner: Runner, job: Job, last_id: int, with_progress: bool) -> AsyncIterator[bytes]:
    while True:
        change = runner.changes.next(job.id)  # the job is there: ids of strangers would stay
        try:
            job = await runner.store.run(find, Job, job.owner, job.id)
            live = runner.live.get(job.id)
            known = list(live.events) if live else []
            if job.is_finished:
                content = await runner.store.run(read_content, job, runner.store.clock_s)
                known = msgspec.msgpack.decode(content.events, type=list[JobEvent])
        except ReportedError as error:  # deleted, or the folder is gone
            yield event(body_of(error), exclude_none=False)
            return
        news = list(events_after(known, last_id))
        if job.is_finished and not news:  # a job that failed may have less text than before a restart
            news = known[-1:]
        for each in news:
            last_id = each.end
            yield b"id: %d\n" % each.end + each.data
        if job.is_finished:
            return
        if with_progress:
            yield b"event: progress\n" + event(make_body(job, live), exclude_none=False)
        if not await is_set_within(change, PING_S):
            yield b": still under way\n\n"
