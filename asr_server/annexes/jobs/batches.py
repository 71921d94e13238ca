"""OpenAI's batches, as a reading of the jobs: a line is a job, and a batch has no state of its own."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Connection, RowMapping, func, select
from starlette.responses import JSONResponse, Response

from asr_server.annexes.jobs.files import page_body, results_id
from asr_server.annexes.jobs.routes import MAX_PAGE, jobs_of
from asr_server.annexes.jobs.service import Jobs, new_row, owner_of
from asr_server.annexes.jobs.store import UNFINISHED, storing
from asr_server.api.models import Models
from asr_server.api.request import (
    parse_transcription_request,
    parse_translation_request,
    read_small_body,
)
from asr_server.api.schemas import Metadata
from asr_server.api.state import metered, models_of, require_key
from asr_server.config import MIB, naming
from asr_server.errors import InvalidValue, RequestError

router = APIRouter(prefix="/v1/batches", dependencies=[Depends(require_key)], include_in_schema=False)

MAX_BODY_BYTES: Final = 64 * 1024
MAX_INPUT_BYTES: Final = 64 * MIB
MAX_LINE_CHARS: Final = 64 * 1024  # some thousand fields: more would hold up the event loop
MAX_ERRORS: Final = 100  # of lines, that are listed
Endpoint = Literal["/v1/audio/transcriptions", "/v1/audio/translations"]


class BatchFields(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field("24h", max_length=16)
    metadata: Metadata | None = None


class LineFields(BaseModel):
    model_config = ConfigDict(extra="forbid")

    custom_id: str = Field(max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@router.post("")
async def create(request: Request) -> Response:
    """Make a job of each line; where one cannot be read, make none."""
    jobs, owner, fields = jobs_of(request), owner_of(request), await _fields_of(request)
    with metered(request):
        source = await jobs.store.row("files", owner, fields.input_file_id)
        if source["num_bytes"] > MAX_INPUT_BYTES:
            raise InvalidValue(f"A batch's lines have at most {MAX_INPUT_BYTES} bytes.", "input_file_id")
        with storing():
            content = await asyncio.to_thread(jobs.store.upload_of(fields.input_file_id).read_bytes)
        try:
            lines = content.decode()
        except UnicodeDecodeError:
            raise InvalidValue("The file is no text: a batch has lines of JSON.", "input_file_id") from None
        reader = _LineReader(jobs, owner, models_of(request), fields.endpoint)
        numbered = [(number, line) for number, line in enumerate(lines.split("\n"), 1) if line.strip()]
        if len(numbered) > jobs.settings.max_jobs:
            raise InvalidValue(f"The batch has {len(numbered)} lines: {naming('max_jobs')}.", "input_file_id")
        for number, line in numbered:
            if len(reader.errors) < MAX_ERRORS:
                await reader.read(number, line)
        batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "owner": owner,
            "metadata": json.dumps(fields.metadata or {}),
            "errors": json.dumps(reader.errors),
            "created_at": time.time(),
            **fields.model_dump(include={"endpoint", "input_file_id", "completion_window"}),
        }
        await _add(jobs, batch, [] if reader.errors else reader.rows)
    jobs.runner.wake()
    return await get_batch(request, str(batch["id"]))


async def _fields_of(request: Request) -> BatchFields:
    """Raises InvalidValue."""
    body = await read_small_body(request, MAX_BODY_BYTES)
    try:
        return BatchFields.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        where = f" at {param!r}" if param else ""
        raise InvalidValue(f"Invalid body{where}: {first['msg']}.", param) from None


class _LineReader:
    def __init__(self, jobs: Jobs, owner: str, models: Models, endpoint: Endpoint) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []  # the recording's file, and the job
        self.errors: list[dict[str, Any]] = []
        self._jobs, self._owner, self._models, self._endpoint = jobs, owner, models, endpoint
        self._names = set[str]()

    async def read(self, number: int, line: str) -> None:
        try:
            self.rows.append(await self._row(line))
        except (RequestError, ValidationError) as error:
            shown = error.message if isinstance(error, RequestError) else str(error.errors()[0]["msg"])
            code, param = getattr(error, "code", "invalid_json_line"), getattr(error, "param", None)
            self.errors.append({"code": code, "line": number, "message": shown, "param": param})

    async def _row(self, line: str) -> tuple[str, dict[str, Any]]:
        if len(line) > MAX_LINE_CHARS:
            raise InvalidValue(f"A line has at most {MAX_LINE_CHARS} characters.")
        fields = LineFields.model_validate_json(line)
        if fields.url != self._endpoint:
            raise InvalidValue(f"'url' must be the batch's endpoint, {self._endpoint}.", "url")
        if fields.custom_id in self._names:
            raise InvalidValue("'custom_id' was given before.", "custom_id")
        self._names.add(fields.custom_id)
        body = dict(fields.body)
        file_id = body.pop("file_id", None)
        if not isinstance(file_id, str):
            raise InvalidValue("'file_id' must name a recording that was sent to /v1/files.", "file_id")
        recording = await self._jobs.store.row("files", self._owner, file_id)
        pairs = [("model", str(body.pop("model", ""))), *_pairs(body)]
        is_translation = self._endpoint.endswith("translations")
        request = (parse_translation_request if is_translation else parse_transcription_request)(
            pairs, self._models
        )
        return file_id, new_row(time.time()) | {
            "id": f"job_{uuid.uuid4().hex}",
            "owner": self._owner,
            "task": request.options.task,
            "model": request.fields.model,
            "response_format": request.fields.response_format,
            "fields": json.dumps(pairs),
            "num_bytes": recording["num_bytes"],
            "custom_id": fields.custom_id,
        }


def _pairs(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a form for those of a JSON object."""
    for name, value in body.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                text = each if isinstance(each, str) else json.dumps(each)
                yield f"{name}[]" if isinstance(value, list) else name, text


async def _add(jobs: Jobs, batch: dict[str, Any], lines: list[tuple[str, dict[str, Any]]]) -> None:
    """Raises Overloaded, StorageUnavailable."""
    store, rows = jobs.store, [row | {"batch": batch["id"]} for _, row in lines]

    def link() -> None:  # the same bytes, which stay when the file is deleted
        for file_id, row in lines:
            os.link(store.upload_of(file_id), store.recording_of(row["id"]))

    def work(connection: Connection) -> None:
        num_bytes = sum(row["num_bytes"] for row in rows)
        jobs.require_room(connection, batch["owner"], len(rows), num_bytes)
        connection.execute(store.table("batches").insert().values(batch))
        if rows:
            connection.execute(store.table("jobs").insert(), rows)

    try:
        with storing():
            await asyncio.to_thread(link)
        await store.run(work)
    except BaseException:
        for row in rows:
            await asyncio.to_thread(store.recording_of(row["id"]).unlink, missing_ok=True)
        raise


@router.get("")
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20, after: str = ""
) -> Response:
    jobs = jobs_of(request)
    rows, has_more = await jobs.store.page("batches", owner_of(request), limit, after, is_descending=True)
    return JSONResponse(page_body([await _body(jobs, row) for row in rows], has_more))


@router.get("/{id}")
async def get_batch(request: Request, id: str) -> Response:
    jobs = jobs_of(request)
    return JSONResponse(await _body(jobs, await jobs.store.row("batches", owner_of(request), id)))


@router.post("/{id}/cancel")
async def cancel(request: Request, id: str) -> Response:
    jobs = jobs_of(request)
    batch = await jobs.store.row("batches", owner_of(request), id)
    table, batches = jobs.store.table("jobs"), jobs.store.table("batches")
    now = time.time()

    def work(connection: Connection) -> list[str]:
        is_open = (table.c.batch == id, table.c.status.in_(UNFINISHED))
        ids = list(connection.scalars(select(table.c.id).where(*is_open)))
        connection.execute(table.update().where(*is_open).values(status="cancelled", finished_at=now))
        if ids:
            connection.execute(batches.update().where(batches.c.id == batch["id"]).values(cancelled_at=now))
        return ids

    for job_id in await jobs.store.run(work):
        await jobs.runner.cancel(job_id)
        await asyncio.to_thread(jobs.store.recording_of(job_id).unlink, missing_ok=True)
        jobs.changes.notify(job_id)
    return await get_batch(request, id)


async def _body(jobs: Jobs, batch: RowMapping) -> dict[str, Any]:
    table = jobs.store.table("jobs")
    query = select(table.c.status, func.count(), func.max(table.c.finished_at)).where(
        table.c.batch == batch["id"]
    )
    rows = await jobs.store.run(lambda connection: connection.execute(query.group_by(table.c.status)).all())
    counts = {status: count for status, count, _ in rows}
    ended_at = max((at for *_, at in rows if at is not None), default=batch["created_at"])
    num_open = sum(counts.get(status, 0) for status in UNFINISHED)
    num_done = counts.get("completed", 0) + counts.get("incomplete", 0)
    num_failed = counts.get("failed", 0)
    errors = json.loads(batch["errors"])
    status = "in_progress" if num_open else "cancelled" if batch["cancelled_at"] else "completed"
    has_errors = num_failed or counts.get("cancelled")
    times = {f"{'failed' if errors else status}_at": int(ended_at)} if errors or not num_open else {}
    return {
        "id": batch["id"],
        "object": "batch",
        "endpoint": batch["endpoint"],
        "input_file_id": batch["input_file_id"],
        "completion_window": batch["completion_window"],
        "created_at": int(batch["created_at"]),
        "in_progress_at": int(batch["created_at"]),
        "status": "failed" if errors else status,
        "errors": {"object": "list", "data": errors} if errors else None,
        "metadata": json.loads(batch["metadata"]),
        "request_counts": {"total": sum(counts.values()), "completed": num_done, "failed": num_failed},
        "output_file_id": results_id(batch["id"], False) if num_done and not num_open else None,
        "error_file_id": results_id(batch["id"], True) if has_errors and not num_open else None,
        **times,
    }
