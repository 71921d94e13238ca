"""Bodies of jobs, as a client reads them."""

from typing import Any, Final, Literal

from asr_server.annexes.jobs.live import LiveJob
from asr_server.annexes.jobs.rows import Job
from asr_server.api.schemas import ErrorDetail
from asr_server.formats.render import Body

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]


class CallbackTry(Body):
    at: int
    """In Unix seconds."""
    status: int | None = None
    """Of HTTP, if there was an answer."""
    error: str | None = None
    """Why there was none."""


class Callback(Body):
    url: str
    """As it was sent."""
    state: Literal["pending", "delivered", "failed"] | None
    """Null before the end of the job."""
    tries: list[CallbackTry]
    """Each, in order."""


class JobBody(Body):
    id: str
    """Of the job."""
    object: Literal["transcription.job"] = "transcription.job"
    """Always `transcription.job`."""
    status: Status
    """As of OpenAI's responses; `incomplete`: the recording is damaged, and this is what could be read."""
    text: Literal[""] = ""
    """Always empty: OpenAI's clients expect one. The content has the text."""
    task: Literal["transcribe", "translate"]
    """What is done."""
    model: str
    """As it was asked for."""
    response_format: str
    """Of the content."""
    created_at: int
    """In Unix seconds."""
    started_at: int | None
    """When it ran first or again, in Unix seconds."""
    completed_at: int | None
    """When it ended, in Unix seconds."""
    seconds_done: float
    """Of the recording, in order."""
    seconds_total: float | None
    """The recording's length; before the end by its header, if that says."""
    place: int | None
    """In the queue, from 1; null once it runs."""
    metadata: dict[str, str]
    """As it was sent."""
    callback: Callback | None
    """Where its end is reported, and how that went."""
    error: ErrorDetail | None
    """Why it failed."""


_SAME: Final = ("id", "status", "task", "model", "response_format", "error")


class JobList(Body):
    object: Literal["list"] = "list"
    """Always `list`."""
    data: list[JobBody]
    """In the order asked for."""
    first_id: str | None
    """Of the first job here."""
    last_id: str | None
    """Of the last job here: send it as `after` for the next page."""
    has_more: bool
    """Whether more follow."""


class DeletedJob(Body):
    id: str
    """Of the job."""
    object: Literal["transcription.job"] = "transcription.job"
    """Always `transcription.job`."""
    deleted: bool = True
    """Always true."""


def make_body(job: Job, live: LiveJob | None, place: int | None = None) -> JobBody:
    done_s = live.done_s if live else 0.0
    return JobBody(
        **{name: getattr(job, name) for name in _SAME},
        created_at=int(job.created_at),
        started_at=int(job.started_at) if job.started_at else None,
        completed_at=int(job.completed_at) if job.completed_at else None,
        seconds_done=(job.duration_s or 0.0) if job.is_finished and not job.error else done_s,
        seconds_total=job.duration_s,
        place=place,
        metadata=job.labels,
        callback=_callback_of(job) if job.callback_url else None,
    )


def _callback_of(job: Job) -> Callback:
    values: dict[str, Any] = {"state": job.callback_state, "tries": job.callback_tries}
    return Callback(url=job.callback_url, **values)
