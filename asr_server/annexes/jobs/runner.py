"""Run jobs, some at a time, in the way of a request: the same fields, options, transcription and reply."""

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session
from starlette.responses import Response

from asr_server import __version__, errors, metrics
from asr_server.annexes.jobs.results import KnownResults
from asr_server.annexes.jobs.rows import Content, Job, Result
from asr_server.annexes.jobs.store import Store, storing
from asr_server.annexes.jobs.views import Changes, JobEvent, LiveJob
from asr_server.api import transcribe
from asr_server.api.errors import body_of, response_to
from asr_server.api.events import EventWriter, event
from asr_server.api.models import ServedModel
from asr_server.api.request import TranscriptionRequest, parse_request
from asr_server.api.state import AppState
from asr_server.api.upload import Pairs
from asr_server.audio.decoder import TOO_MANY_FILES
from asr_server.checkpoint.files import revision_of
from asr_server.core import ChunkResult
from asr_server.telemetry import logging_for

AT_ONCE: Final = 16  # as many as `asr-server transcribe` keeps under way
# Starts of a job that gets no further: it may be what ends the server.
ALONE_AFTER: Final = 3  # what runs beside another is a suspect wherever the server ends
MOST_STARTS: Final = 10
MIN_PAUSE_S: Final = 1.0  # before a job that the server could not do is tried again
MAX_PAUSE_S: Final = 60.0
ROUTE: Final = "job"  # in the metrics of requests

logger = logging.getLogger(__name__)

End = tuple[Content, dict[str, Any]]  # with the last values of its job


class Runner:
    def __init__(
        self, state: AppState, store: Store, changes: Changes, on_finished: Callable[[Job], None]
    ) -> None:
        self.live: dict[str, LiveJob] = {}
        self.store, self.changes = store, changes
        self._state = state
        self._on_finished = on_finished  # called after a job's end is stored
        self._wake = asyncio.Event()
        self._places = asyncio.Semaphore(AT_ONCE)

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._start_some()
                except errors.ServiceUnavailable:
                    await asyncio.sleep(MIN_PAUSE_S)
                else:
                    await self._wake.wait()
        finally:
            tasks = [live.task for live in self.live.values() if live.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_some(self) -> None:
        """Raises StorageUnavailable, EngineUnavailable."""
        self._state.models.require_engine()  # while it loads, nothing is begun
        dispatchers = [model.dispatcher for model in self._state.models]
        while not self._places.locked() and not any(each.draining for each in dispatchers):
            running = [live for live in self.live.values() if not live.is_waiting]
            if any(live.is_suspect for live in running):
                return
            job = await self.store.run(_start_next, Counter(live.owner for live in running))
            if job is None:
                return
            live = self.live[job.id] = LiveJob(job.owner, is_suspect=job.num_starts >= ALONE_AFTER)
            live.task = asyncio.create_task(self._run(job, live), name=job.id)
            live.task.add_done_callback(partial(self._on_done, job))
            self.changes.notify(job.id)
            await asyncio.sleep(0)  # it takes its place

    def _on_done(self, job: Job, task: asyncio.Task[None]) -> None:
        del self.live[job.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("job %s has ended without being stored", job.id, exc_info=error)
        self.changes.notify(job.id)
        self.wake()

    async def cancel(self, id: str) -> None:
        live = self.live.get(id)
        if live is not None and live.task is not None:
            live.task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([live.task])

    # -- One job --

    async def _run(self, job: Job, live: LiveJob) -> None:
        pause_s = MIN_PAUSE_S
        with logging_for(job.id):
            while True:
                async with self._places:
                    if await self._try(job, live):
                        return
                live.is_waiting = True  # for an engine or a disk, and keeps nobody from a place
                self.wake()
                await asyncio.sleep(pause_s)
                live.is_waiting = False
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try(self, job: Job, live: LiveJob) -> bool:
        """Return False if the server could not do it now."""
        stats = metrics.begin_request_stats(lambda: ROUTE)
        stats.counts_audio_at_end = True
        accounts = self._state.api_keys.accounts
        stats.account = next((each for each in accounts if each.name == job.owner), None)
        started_at = time.monotonic()
        try:
            content, values = await self._end_of(job, live)
            if not await self.store.run(_finish, job, content, values):
                return True  # deleted or cancelled meanwhile
        except errors.ServiceUnavailable as error:  # no fault of the job
            logger.warning("job %s waits: %s", job.id, error.message)
            return False
        stats.on_answered(ROUTE)
        logger.info("job %s: %s in %.3f s%s", job.id, values["status"], time.monotonic() - started_at, stats)
        job.status = values["status"]
        self._on_finished(job)
        with suppress(errors.StorageUnavailable):  # the next sweep tries again
            await self.store.collect(job.file)
        return True

    async def _end_of(self, job: Job, live: LiveJob) -> End:
        try:
            if job.num_starts >= MOST_STARTS:
                raise errors.ServerEnded(
                    f"The server has ended {MOST_STARTS} times at the same place of this job."
                )
            return await self._transcribe(job, live)
        except errors.ServiceUnavailable:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise errors.StorageUnavailable(TOO_MANY_FILES) from error
            if not isinstance(error, errors.ReportedError):
                logger.exception("job %s has failed", job.id)
            body = body_of(error)
            events = live.close(event(body, exclude_none=False))
            values = {"status": "failed", "error": body.error.model_dump()}
            return _content(response_to(error), events), values

    async def _transcribe(self, job: Job, live: LiveJob) -> End:
        request = await self._request_of(job)
        recording = transcribe.recording_for(request, await asyncio.to_thread(self._recording_of, job))
        live.events, live.done_s = [], 0.0
        writer, model = EventWriter(request.fields, request.render_options), request.model
        reports, keep = await self.store.run(_results_of, job), partial(self._keep_result, job, live)
        known = KnownResults(model.dispatcher, _engine_of(model), reports, keep)
        asked = self._state, request, recording, known.open
        with metrics.current_request_stats().stage("transcription"):
            async with model.using(), await transcribe.transcription_of(*asked) as transcription:
                if not live.is_counted:  # what only waits for an engine is not to blame for a server's end
                    live.is_counted = True
                    count = update(Job).where(Job.number == job.number).values(num_starts=Job.num_starts + 1)
                    await self.store.run(lambda session: session.execute(count))
                async for delta in transcription:
                    live.add(delta.text, writer.delta(delta))
                    live.done_s = max(live.done_s, delta.end_s)
                    self.changes.notify(job.id)
                transcript = await transcription.transcript()
        response = await transcribe.whole_answer(transcript, request, transcribe.body_response)
        done = await transcribe.rendered(transcript, lambda: writer.done(transcript))
        status = "incomplete" if transcript.is_cut_short else "completed"
        values = {"status": status, "duration_s": transcript.duration_s}
        return _content(response, live.close(done + transcribe.STREAM_END)), values

    async def _keep_result(self, job: Job, live: LiveJob, chunk: int, part: int, data: bytes) -> None:
        await self.store.run(_keep_result, job, chunk, part, data)
        if live.is_suspect:
            live.is_suspect = False
            self.wake()

    async def _request_of(self, job: Job) -> TranscriptionRequest:
        account = metrics.current_request_stats().account
        models = self._state.models.allowed(account.models if account else None)
        return parse_request(job.task, await self.store.run(_fields_of, job), models)

    def _recording_of(self, job: Job) -> Path:
        with storing():  # the folder may be gone, with all files
            is_there = job.file in os.listdir(self.store.files)
        if not is_there:
            raise errors.RecordingLost("The recording of this job is gone from the server's folder of jobs.")
        return self.store.files / job.file


def _engine_of(model: ServedModel) -> str:
    """Return what kept results depend on, and their fields, which may be others in the next release."""
    settings, fields = model.settings, " ".join(ChunkResult.__struct_fields__)
    return f"{__version__} {settings.model} {revision_of(Path(settings.model))} {settings.dtype} {fields}"


def _content(response: Response, events: list[JobEvent]) -> Content:
    return Content(
        status_code=response.status_code,
        headers={name: value for name, value in response.headers.items() if name != "content-length"},
        body=bytes(response.body),
        events=msgspec.msgpack.encode(events),
    )


def requeue(session: Session, is_in_order: bool = False) -> None:
    """Queue again what ran when a server ended; an end in order is no fault of the job."""
    values = {"status": "queued"} | ({"num_starts": 0} if is_in_order else {})
    session.execute(update(Job).where(Job.status == "in_progress").values(values))


def _start_next(session: Session, num_running: Counter[str]) -> Job | None:
    """Take the oldest queued job of the key with the fewest that run. A suspect runs alone."""
    firsts = select(Job.owner, func.min(Job.number)).where(Job.status == "queued").group_by(Job.owner)
    waiting = session.execute(firsts).all()
    if not waiting:
        return None
    _, number = min(waiting, key=lambda row: (num_running[row[0]], row[1]))
    job = session.get_one(Job, number)
    if job.num_starts >= ALONE_AFTER and num_running:
        return None
    job.status, job.started_at = "in_progress", time.time()
    return job


def _fields_of(session: Session, job: Job) -> Pairs:
    pairs = session.scalar(select(Job.fields).where(Job.number == job.number)) or []
    return [(name, value) for name, value in pairs]


def _results_of(session: Session, job: Job) -> dict[tuple[int, int], bytes]:
    results = session.scalars(select(Result).where(Result.job == job.number))
    return {(each.chunk, each.part): each.data for each in results}


def _keep_result(session: Session, job: Job, chunk: int, part: int, data: bytes) -> None:
    if (stored := session.get(Job, job.number)) is not None:
        stored.num_starts = 0
        session.merge(Result(job=job.number, chunk=chunk, part=part, data=data))


def _finish(session: Session, job: Job, content: Content, values: dict[str, Any]) -> bool:
    """Return whether the job was still there, and not cancelled."""
    stored = session.get(Job, job.number)
    if stored is None or stored.status != "in_progress":
        return False
    for name, value in values.items():
        setattr(stored, name, value)
    stored.completed_at, stored.callback_state = time.time(), "pending" if job.callback_url else None
    content.job = job.number
    session.add(content)
    session.execute(delete(Result).where(Result.job == job.number))
    return True
