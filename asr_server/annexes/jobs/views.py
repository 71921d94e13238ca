"""What a client sees of jobs: their bodies, their text so far as events, and when they change."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from asr_server.annexes.jobs.rows import Job
from asr_server.api.events import event
from asr_server.api.schemas import ErrorDetail, TextDelta
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


class JobEvent(msgspec.Struct, frozen=True, array_like=True):
    """Server-sent events of a stretch of the text.

    Its id is where the text ends, in characters: after a crash the same text may come in other pieces.
    """

    end: int
    text: str
    data: bytes


def events_after(events: Iterable[JobEvent], last_id: int) -> Iterator[JobEvent]:
    """Yield what follows an id; of a piece that it lies in, the rest of the text."""
    for each in events:
        num_missing = each.end - last_id
        if 0 < num_missing < len(each.text):
            text = each.text[-num_missing:]
            yield JobEvent(each.end, text, event(TextDelta(delta=text)))
        elif num_missing > 0:
            yield each


@dataclass
class LiveJob:
    """A job under way in this process."""

    owner: str
    task: asyncio.Task[None] | None = None
    events: list[JobEvent] = field(default_factory=list)
    done_s: float = 0.0
    is_waiting: bool = False  # for what the server lacks
    is_counted: bool = False  # as work that may end the server
    is_suspect: bool = False  # the server ended often with nothing new of it

    @property
    def num_chars(self) -> int:
        return self.events[-1].end if self.events else 0

    def add(self, text: str, data: bytes) -> None:
        if data:
            self.events.append(JobEvent(self.num_chars + len(text), text, data))

    def close(self, data: bytes) -> list[JobEvent]:
        """Return all events, and these behind the text."""
        return [*self.events, JobEvent(self.num_chars + 1, "", data)]


_SAME: Final = ("id", "status", "task", "model", "response_format", "error")


def make_body(job: Job, live: LiveJob | None, place: int | None = None) -> JobBody:
    done_s = live.done_s if live else 0.0
    callback = {"url": job.callback_url, "state": job.callback_state, "tries": job.callback_tries}
    return JobBody(
        **{name: getattr(job, name) for name in _SAME},
        created_at=int(job.created_at),
        started_at=int(job.started_at) if job.started_at else None,
        completed_at=int(job.completed_at) if job.completed_at else None,
        seconds_done=(job.duration_s or 0.0) if job.is_finished and not job.error else done_s,
        seconds_total=job.duration_s,
        place=place,
        metadata=job.labels,
        callback=Callback.model_validate(callback) if job.callback_url else None,
    )


class Changes:
    """Wake those who wait for the next change of a job.

    An event that nobody waits for any more stays until that change: as many as there are jobs.
    """

    def __init__(self) -> None:
        self._next: dict[str, asyncio.Event] = {}

    def next(self, id: str) -> asyncio.Event:
        """Return what is set by the next change: ask before a look, so that none is missed behind it."""
        return self._next.setdefault(id, asyncio.Event())

    def notify(self, id: str) -> None:
        if change := self._next.pop(id, None):
            change.set()


async def is_set_within(change: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            return await change.wait()
    except TimeoutError:
        return False
