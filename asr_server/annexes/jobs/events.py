"""Stream a job's text as the endpoint's stream does, from the start or from where a client left it."""

from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec
from starlette.responses import StreamingResponse

from asr_server.annexes.jobs.bodies import make_body
from asr_server.annexes.jobs.live import JobEvent, events_after, is_set_within
from asr_server.annexes.jobs.rows import Job
from asr_server.annexes.jobs.runner import Runner
from asr_server.api.errors import body_of
from asr_server.api.events import event
from asr_server.errors import ReportedError

PING_S: Final = 15.0  # proxies close a connection that is silent for long
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_decoder: Final = msgspec.msgpack.Decoder(list[JobEvent])


def events_response(
    runner: Runner, job: Job, last_id: int, headers: Mapping[str, str], with_progress: bool
) -> StreamingResponse:
    events = _events(runner, job, last_id, with_progress)
    return StreamingResponse(
        events, headers={**_HEADERS, **headers}, media_type="text/event-stream; charset=utf-8"
    )


async def _events(runner: Runner, job: Job, last_id: int, with_progress: bool) -> AsyncIterator[bytes]:
    while True:
        change = runner.changes.next(job.id)  # the job is there: ids of strangers would stay
        try:
            job = await runner.store.find(Job, job.owner, job.id)
            known = await _known(runner, job)
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
            yield b"event: progress\n" + event(make_body(job, runner.live.get(job.id)), exclude_none=False)
        if not await is_set_within(change, PING_S):
            yield b": still under way\n\n"


async def _known(runner: Runner, job: Job) -> list[JobEvent]:
    if job.is_finished:
        return _decoder.decode((await runner.store.content_of(job)).events)
    live = runner.live.get(job.id)
    return list(live.events) if live else []
