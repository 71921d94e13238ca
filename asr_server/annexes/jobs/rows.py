"""The tables of jobs.

Names that end in `_at` are Unix seconds. Those in `_clock_s` count the seconds that servers ran: no jump of
the machine's clock is in them.
"""

import time
from typing import Any, Final

from sqlalchemy import JSON, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

UNFINISHED: Final = ("queued", "in_progress")
STATUSES: Final = (*UNFINISHED, "completed", "failed", "cancelled", "incomplete")

_JSON: Final = JSON(none_as_null=True)


class Row(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: _JSON, list[Any]: _JSON}  # noqa: RUF012


class Clock(Row):
    __tablename__ = "clock"
    number: Mapped[int] = mapped_column(primary_key=True)
    clock_s: Mapped[float]


class Kept(Row):
    """A row that a key has until it is old."""

    __abstract__ = True
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012
    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str] = mapped_column(index=True)  # the key's name
    is_listed: Mapped[bool] = mapped_column(default=True, index=True)
    created_at: Mapped[float] = mapped_column(default=lambda: time.time())
    ended_clock_s: Mapped[float | None]  # since when the sweep knows that nothing more comes of it


class File(Kept):
    """A file on the disk. Not listed: a job's own recording, or one that was deleted before its last job."""

    __tablename__ = "files"
    purpose: Mapped[str]
    filename: Mapped[str]
    num_bytes: Mapped[int]


class Batch(Kept):
    __tablename__ = "batches"
    endpoint: Mapped[str]
    input_file_id: Mapped[str]
    completion_window: Mapped[str]
    labels: Mapped[dict[str, Any]]  # the client's `metadata`
    errors: Mapped[list[Any]]  # why its lines cannot be read
    cancelled_at: Mapped[float | None]


class Job(Kept):
    __tablename__ = "jobs"
    file: Mapped[str] = mapped_column(index=True)  # its recording, which goes when it has ended
    task: Mapped[str]
    model: Mapped[str]  # as it was asked for
    response_format: Mapped[str]
    fields: Mapped[list[Any]] = mapped_column(deferred=True)  # pairs, as they were sent: perhaps megabytes
    labels: Mapped[dict[str, Any]] = mapped_column(default=dict)  # the client's `metadata`
    idempotency_key: Mapped[str] = mapped_column(default="", index=True)
    fingerprint: Mapped[str] = mapped_column(default="", index=True)
    status: Mapped[str] = mapped_column(default="queued", index=True)
    started_at: Mapped[float | None]
    completed_at: Mapped[float | None]
    duration_s: Mapped[float | None]  # by the file's header; once it is done, exactly
    error: Mapped[dict[str, Any] | None]  # as in the body of a reply
    num_starts: Mapped[int] = mapped_column(default=0)  # without a new result
    read_clock_s: Mapped[float | None]  # when its content was read
    callback_url: Mapped[str] = mapped_column(default="")
    callback_tries: Mapped[list[Any]] = mapped_column(default=list)
    callback_state: Mapped[str | None]  # pending, delivered, failed
    batch: Mapped[str | None] = mapped_column(ForeignKey(Batch.id, ondelete="CASCADE"), index=True)
    custom_id: Mapped[str | None]  # in its batch

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED


class Result(Row):
    """An answer of the engine, kept while the job is unfinished."""

    __tablename__ = "results"
    job: Mapped[int] = mapped_column(ForeignKey(Job.number, ondelete="CASCADE"), primary_key=True)
    chunk: Mapped[int] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[bytes]  # msgpack


class Content(Row):
    """The reply that the endpoint would have made, and its events."""

    __tablename__ = "contents"
    job: Mapped[int] = mapped_column(ForeignKey(Job.number, ondelete="CASCADE"), primary_key=True)
    status_code: Mapped[int]
    headers: Mapped[dict[str, Any]]
    body: Mapped[bytes]
    events: Mapped[bytes]  # msgpack
