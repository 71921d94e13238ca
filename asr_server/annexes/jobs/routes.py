"""The routes of jobs."""

import time
from typing import Annotated, Final, Literal, cast

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import Response

from asr_server.annexes.jobs.rows import Job
from asr_server.annexes.jobs.service import Jobs, events_response, owner_of
from asr_server.annexes.jobs.store import find, page, read_content
from asr_server.annexes.jobs.views import DeletedJob, JobBody, JobList, is_set_within, make_body
from asr_server.api.openapi import error_responses
from asr_server.api.state import require_key
from asr_server.errors import InvalidApiKey, InvalidValue, NotFound, StorageUnavailable

MAX_WAIT_S: Final = 120.0
MAX_PAGE: Final = 100
MAX_DIGITS: Final = 18  # of an event's id
_ERRORS: Final = error_responses(InvalidApiKey, NotFound, StorageUnavailable)

Id = Annotated[str, Path(description="Of the job.")]
router = APIRouter(
    prefix="/v1/audio/transcriptions", dependencies=[Depends(require_key)], responses=_ERRORS, tags=["jobs"]
)


def jobs_of(request: Request) -> Jobs:
    return cast(Jobs, request.app.state.jobs)


@router.get("")
async def list_jobs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most jobs of this page.")] = 20,
    after: Annotated[str, Query(description="The job before the first of this page.")] = "",
    order: Annotated[Literal["asc", "desc"], Query(description="By age; desc: the newest first.")] = "desc",
) -> JobList:
    """Return the key's jobs, a page at a time."""
    jobs, owner = jobs_of(request), owner_of(request)
    rows, about = await jobs.store.run(page, Job, owner, limit, after, order == "desc")
    return JobList(data=[make_body(job, jobs.runner.live.get(job.id)) for job in rows], **about)


@router.get("/{id}")
async def get_job(
    request: Request, id: Id, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds.")] = 0.0
) -> JobBody:
    """Return a job; with `wait`, once its status changes or after so many seconds."""
    jobs, owner = jobs_of(request), owner_of(request)
    end = time.monotonic() + wait
    job = first = await jobs.store.run(find, Job, owner, id)
    while job.status == first.status and not job.is_finished and time.monotonic() < end:
        change = jobs.changes.next(id)  # behind the first look: ids of strangers would stay
        job = await jobs.store.run(find, Job, owner, id)
        if job.status == first.status and await is_set_within(change, end - time.monotonic()):
            job = await jobs.store.run(find, Job, owner, id)
    return await jobs.describe(job)


@router.get("/{id}/content", response_model=None)
async def get_content(request: Request, id: Id) -> Response:
    """Return what the endpoint would have answered."""
    store = jobs_of(request).store
    job = await store.run(find, Job, owner_of(request), id)
    content = await store.run(read_content, job, store.clock_s)
    return Response(content.body, content.status_code, content.headers)


@router.get("/{id}/events", response_model=None)
async def get_events(
    request: Request, id: Id, last_event_id: Annotated[str, Header(description="The last one read.")] = "0"
) -> Response:
    """Stream the text and the progress as server-sent events, from the start or behind `Last-Event-ID`."""
    if not last_event_id.isdecimal() or len(last_event_id) > MAX_DIGITS:
        raise InvalidValue("'Last-Event-ID' is the id of an event: a number.")
    jobs = jobs_of(request)
    job = await jobs.store.run(find, Job, owner_of(request), id)
    return events_response(jobs.runner, job, int(last_event_id), {}, with_progress=True)


@router.delete("/{id}")
async def delete_job(request: Request, id: Id) -> DeletedJob:
    """Cancel a job and delete its recording and its content for good."""
    await jobs_of(request).delete(owner_of(request), id)
    return DeletedJob(id=id)
