"""The tables of jobs, their results, files and batches."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, ForeignKey, Integer, LargeBinary, Text

revision = "1"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "batches",
        Column("number", Integer, primary_key=True),
        Column("id", Text, nullable=False, unique=True),
        Column("owner", Text, nullable=False),  # the key's name
        Column("endpoint", Text, nullable=False),
        Column("input_file_id", Text, nullable=False),
        Column("completion_window", Text, nullable=False),
        Column("metadata", Text, nullable=False),  # JSON
        Column("errors", Text, nullable=False),  # JSON: why its lines cannot be read
        Column("created_at", Float, nullable=False),  # Unix seconds, as all
        Column("cancelled_at", Float),
        Column("age_s", Float, nullable=False, server_default="0"),  # since none of its jobs is left
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        Column("number", Integer, primary_key=True),
        Column("id", Text, nullable=False, unique=True),
        Column("owner", Text, nullable=False, index=True),
        Column("task", Text, nullable=False),
        Column("model", Text, nullable=False),  # as it was asked for
        Column("response_format", Text, nullable=False),
        Column("fields", Text, nullable=False),  # JSON pairs, as they were sent
        Column("metadata", Text, nullable=False),  # JSON
        Column("idempotency_key", Text, nullable=False, index=True),
        Column("fingerprint", Text, nullable=False, index=True),
        Column("status", Text, nullable=False, index=True),
        Column("created_at", Float, nullable=False),
        Column("started_at", Float),
        Column("finished_at", Float),
        Column("num_bytes", Integer, nullable=False),  # of the recording
        Column("duration_s", Float),  # by its header; once it is done, exactly
        Column("error", Text),  # JSON, as in the body of a reply
        Column("num_starts", Integer, nullable=False, server_default="0"),  # without a new result
        Column("age_s", Float, nullable=False, server_default="0"),  # since it is finished
        Column("read_age_s", Float),  # since its content was read
        Column("callback_url", Text, nullable=False),
        Column("callbacks", Text, nullable=False, server_default="[]"),  # JSON: each try and its outcome
        Column("callback_state", Text),  # pending, delivered, failed
        Column("batch", Text, index=True),
        Column("custom_id", Text),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "results",  # of the engine, of chunks of unfinished jobs
        Column("job", Integer, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
        Column("chunk", Integer, primary_key=True),
        Column("part", Integer, primary_key=True),
        Column("data", LargeBinary, nullable=False),  # msgpack
    )
    op.create_table(
        "contents",  # of finished jobs
        Column("job", Integer, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
        Column("status_code", Integer, nullable=False),
        Column("headers", Text, nullable=False),  # JSON pairs
        Column("body", LargeBinary, nullable=False),
        Column("events", LargeBinary, nullable=False),  # msgpack
    )
    op.create_table(
        "files",
        Column("number", Integer, primary_key=True),
        Column("id", Text, nullable=False, unique=True),
        Column("owner", Text, nullable=False),
        Column("purpose", Text, nullable=False),
        Column("filename", Text, nullable=False),
        Column("num_bytes", Integer, nullable=False),
        Column("created_at", Float, nullable=False),
        Column("age_s", Float, nullable=False, server_default="0"),
        sqlite_autoincrement=True,
    )
