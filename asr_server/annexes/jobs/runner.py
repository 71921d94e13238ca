"""Run jobs, some at a time, in the way of a request: the same fields, options, session and reply."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from starlette.responses import Response

from asr_server import __version__, metrics
from asr_server.annexes.jobs.live import Changes, JobEvent, LiveJob
from asr_server.annexes.jobs.results import KnownResults
from asr_server.annexes.jobs.store import Content, Job, Store, storing
from asr_server.api.errors import body_of, response_to
from asr_server.api.events import EventWriter, event
from asr_server.api.models import ServedModel
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.state import AppState
from asr_server.api.transcribe import (
    STREAM_END,
    body_response,
    recording_for,
    rendered,
    session_for,
    whole_answer,
)
from asr_server.audio.decoder import TOO_MANY_FILES
from asr_server.checkpoint.cache import revision_of
from asr_server.core import Transcript
from asr_server.errors import (
    RecordingLost,
    ReportedError,
    ServerEnded,
    ServiceUnavailable,
    StorageUnavailable,
)
from asr_server.telemetry import logging_for

AT_ONCE: Final = 16  # as many as `asr-server transcribe` keeps under way
MOST_STARTS: Final = 10  # of a job that gets no further: it may be what ends the server
MIN_PAUSE_S: Final = 1.0  # before a job that the server could not do is tried again
MAX_PAUSE_S: Final = 60.0
ROUTE: Final = "job"  # in the metrics of requests

logger = logging.getLogger(__name__)


class Runner:
    """Args:
    on_finished: called after a job's end is stored.
    """

    def __init__(
        self, state: AppState, store: Store, changes: Changes, on_finished: Callable[[Job], None]
    ) -> None:
        self.live: dict[str, LiveJob] = {}
        self.store, self.changes = store, changes
        self._state = state
        self._on_finished = on_finished
        self._wake = asyncio.Event()
        self._num_running = Counter[str]()  # by key
        self._num_waiting = 0  # for an engine or a disk: they keep nobody from a place
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
                except ServiceUnavailable:
                    await asyncio.sleep(MIN_PAUSE_S)
                else:
                    await self._wake.wait()
        finally:
            tasks = [live.task for live in self.live.values() if live.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_some(self) -> None:
        """Raises StorageUnavailable."""
        while len(self.live) - self._num_waiting < AT_ONCE and not self._is_draining:
            job = await self.store.start_next(self._num_running, time.time())
            if job is None:
                return
            live = self.live[job.id] = LiveJob()
            live.task = asyncio.create_task(self._run(job, live), name=job.id)
            self._num_running[job.owner] += 1
            live.task.add_done_callback(partial(self._on_done, job))
            self.changes.notify(job.id)

    @property
    def _is_draining(self) -> bool:
        return any(model.dispatcher.draining for model in self._state.models)

    def _on_done(self, job: Job, task: asyncio.Task[None]) -> None:
        del self.live[job.id]
        self._num_running[job.owner] -= 1
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
        with logging_for(job.id):
            stats = metrics.begin_request_stats(lambda: ROUTE)
            accounts = self._state.api_keys.accounts
            stats.account = next((each for each in accounts if each.name == job.owner), None)
            pause_s = MIN_PAUSE_S
            while True:
                async with self._places:
                    if await self._try(job, live, stats):
                        return
                await self._wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _wait(self, pause_s: float) -> None:
        self._num_waiting += 1
        self.wake()
        try:
            await asyncio.sleep(pause_s)
        finally:
            self._num_waiting -= 1

    async def _try(self, job: Job, live: LiveJob, stats: metrics.RequestStats) -> bool:
        """Return False if the server could not do it now."""
        started_at = time.monotonic()
        try:
            content, values = await self._content(job, live)
            callback_state = "pending" if job.callback_url else None
            values |= {"finished_at": time.time(), "callback_state": callback_state}
            await self.store.finish(job, content, **values)
        except ServiceUnavailable as error:  # no fault of the job
            logger.warning("job %s waits: %s", job.id, error.message)
            return False
        stats.on_answered(ROUTE)
        logger.info("job %s: %s in %.3f s%s", job.id, values["status"], time.monotonic() - started_at, stats)
        self._on_finished(replace(job, status=str(values["status"])))
        return True

    async def _content(self, job: Job, live: LiveJob) -> tuple[Content, dict[str, object]]:
        try:
            if job.num_starts > MOST_STARTS:
                raise ServerEnded(f"The server has ended {MOST_STARTS} times at the same place of this job.")
            return await self._transcribe(job, live)
        except ServiceUnavailable:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise StorageUnavailable(TOO_MANY_FILES) from error
            if not isinstance(error, ReportedError):
                logger.exception("job %s has failed", job.id)
            body = body_of(error)
            events = [*live.events, JobEvent(live.num_chars + 1, "", event(body, exclude_none=False))]
            error_json = json.dumps(body.model_dump()["error"])
            return _content_of(response_to(error), events), {"status": "failed", "error": error_json}

    async def _transcribe(self, job: Job, live: LiveJob) -> tuple[Content, dict[str, object]]:
        request = await self._request_of(job)
        recording = recording_for(request, await asyncio.to_thread(self._recording_of, job))
        live.begin(job.duration_s)
        writer = EventWriter(request.fields, request.render_options)
        model, keep = request.model, partial(self.store.keep_result, job)
        known = KnownResults(model.dispatcher, _engine_of(model), await self.store.results_of(job), keep)
        stats = metrics.current_request_stats()
        with stats.stage("transcription"):
            async with model.using(), session_for(self._state, request, recording, known.open) as session:
                async for delta in session:
                    live.add(delta.text, writer.delta(delta))
                    live.done_s = max(live.done_s, delta.end_s)
                    self.changes.notify(job.id)
                transcript = await session.transcript()
        return await self._reply(transcript, request, live, writer)

    async def _reply(
        self, transcript: Transcript, request: TranscriptionRequest, live: LiveJob, writer: EventWriter
    ) -> tuple[Content, dict[str, object]]:
        response = await whole_answer(transcript, request, body_response)
        done = await rendered(transcript, lambda: writer.done(transcript))
        events = [*live.events, JobEvent(live.num_chars + 1, "", done + STREAM_END)]
        status = "incomplete" if transcript.is_cut_short else "completed"
        return _content_of(response, events), {"status": status, "duration_s": transcript.duration_s}

    async def _request_of(self, job: Job) -> TranscriptionRequest:
        parse = parse_translation_request if job.task == "translate" else parse_transcription_request
        account = metrics.current_request_stats().account
        names = account.models if account else None
        models = self._state.models
        fields = await self.store.fields_of(job)
        return parse(fields, models if names is None else models.allowed(names))

    def _recording_of(self, job: Job) -> Path:
        path = self.store.recording_of(job.id)
        with storing():
            is_there = path.name in {each.name for each in path.parent.iterdir()}
        if not is_there:
            raise RecordingLost("The recording of this job is gone from the server's folder of jobs.")
        return path


def _engine_of(model: ServedModel) -> str:
    settings = model.settings
    return f"{__version__} {settings.model} {revision_of(Path(settings.model))} {settings.dtype}"


def _content_of(response: Response, events: list[JobEvent]) -> Content:
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    return Content(
        response.status_code, json.dumps(headers), bytes(response.body), msgspec.msgpack.encode(events)
    )
