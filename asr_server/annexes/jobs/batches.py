"""OpenAI's batches, as a reading of the jobs: a line is a job, and a batch has no state of its own."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from starlette.responses import JSONResponse, Response

from asr_server.annexes.jobs.files import page_body, results_id
from asr_server.annexes.jobs.routes import MAX_PAGE, jobs_of
from asr_server.annexes.jobs.rows import UNFINISHED, Batch, File, Job
from asr_server.annexes.jobs.service import Jobs, owner_of
from asr_server.annexes.jobs.store import Store, page, storing
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
        source = await jobs.store.find(File, owner, fields.input_file_id)
        lines = await _lines_of(jobs, source)
        own_files = select(File.id).where(File.owner == owner, File.is_listed)
        files = await jobs.store.run(lambda session: set(session.scalars(own_files)))
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            labels=fields.metadata or {},
            errors=[],
            **fields.model_dump(include={"endpoint", "input_file_id", "completion_window"}),
        )
        reader = _LineReader(batch, models_of(request), files)
        for number, line in lines:
            if len(batch.errors) < MAX_ERRORS:
                reader.read(number, line)
                await asyncio.sleep(0)
        await jobs.store.run(jobs.add, batch, *([] if batch.errors else reader.jobs))
    jobs.runner.wake()
    return JSONResponse(await _body(jobs.store, batch))


async def _fields_of(request: Request) -> BatchFields:
    body = await read_small_body(request, MAX_BODY_BYTES)
    try:
        return BatchFields.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


async def _lines_of(jobs: Jobs, source: File) -> list[tuple[int, str]]:
    """Return lines with their numbers. Raises InvalidValue, StorageUnavailable."""
    if source.num_bytes > MAX_INPUT_BYTES:
        raise InvalidValue(f"A batch's lines have at most {MAX_INPUT_BYTES} bytes.", "input_file_id")
    with storing():
        content = await asyncio.to_thread(jobs.store.path_of(source.id).read_bytes)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidValue("The file is no text: a batch has lines of JSON.", "input_file_id") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > jobs.settings.max_jobs:
        raise InvalidValue(f"The batch has {len(lines)} lines: {naming('max_jobs')}.", "input_file_id")
    return lines


class _LineReader:
    def __init__(self, batch: Batch, models: Models, files: set[str]) -> None:
        self.jobs: list[Job] = []
        self._batch, self._models, self._files = batch, models, files
        is_translation = batch.endpoint.endswith("translations")
        self._parse = parse_translation_request if is_translation else parse_transcription_request
        self._names = set[str]()

    def read(self, number: int, line: str) -> None:
        try:
            self.jobs.append(self._job(line))
        except (RequestError, ValidationError) as error:
            shown = error.message if isinstance(error, RequestError) else str(error.errors()[0]["msg"])
            code, param = getattr(error, "code", "invalid_json_line"), getattr(error, "param", None)
            self._batch.errors.append({"code": code, "line": number, "message": shown, "param": param})

    def _job(self, line: str) -> Job:
        if len(line) > MAX_LINE_CHARS:
            raise InvalidValue(f"A line has at most {MAX_LINE_CHARS} characters.")
        fields = LineFields.model_validate_json(line)
        if fields.url != self._batch.endpoint:
            raise InvalidValue(f"'url' must be the batch's endpoint, {self._batch.endpoint}.", "url")
        if fields.custom_id in self._names:
            raise InvalidValue("'custom_id' was given before.", "custom_id")
        self._names.add(fields.custom_id)
        file_id = fields.body.pop("file_id", None)
        if not isinstance(file_id, str) or file_id not in self._files:
            raise InvalidValue("'file_id' must name a recording that was sent to /v1/files.", "file_id")
        pairs = [("model", str(fields.body.pop("model", ""))), *_pairs(fields.body)]
        request = self._parse(pairs, self._models)
        return Job(
            id=f"job_{uuid.uuid4().hex}",
            owner=self._batch.owner,
            file=file_id,
            task=request.options.task,
            model=request.fields.model,
            response_format=request.fields.response_format,
            fields=pairs,
            batch=self._batch.id,
            custom_id=fields.custom_id,
        )


def _pairs(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a form for those of a JSON object."""
    for name, value in body.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                text = each if isinstance(each, str) else json.dumps(each)
                yield f"{name}[]" if isinstance(value, list) else name, text


@router.get("")
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20, after: str = ""
) -> Response:
    store = jobs_of(request).store
    batches, has_more = await store.run(page, Batch, owner_of(request), limit, after, is_descending=True)
    return JSONResponse(page_body([await _body(store, batch) for batch in batches], has_more))


@router.get("/{id}")
async def get_batch(request: Request, id: str) -> Response:
    store = jobs_of(request).store
    return JSONResponse(await _body(store, await store.find(Batch, owner_of(request), id)))


@router.post("/{id}/cancel")
async def cancel(request: Request, id: str) -> Response:
    jobs = jobs_of(request)
    batch = await jobs.store.find(Batch, owner_of(request), id)
    await jobs.end(*await jobs.store.run(_cancel, batch))
    return await get_batch(request, id)


def _cancel(session: Session, batch: Batch) -> list[str]:
    now = time.time()
    is_open = (Job.batch == batch.id, Job.status.in_(UNFINISHED))
    cancelled = update(Job).where(*is_open).values(status="cancelled", completed_at=now)
    ids = list(session.scalars(cancelled.returning(Job.id)))
    if ids:
        session.execute(update(Batch).where(Batch.number == batch.number).values(cancelled_at=now))
    return ids


async def _body(store: Store, batch: Batch) -> dict[str, Any]:
    query = select(Job.status, func.count(), func.max(Job.completed_at)).where(Job.batch == batch.id)
    rows = await store.run(lambda session: session.execute(query.group_by(Job.status)).all())
    counts = {status: count for status, count, _ in rows}
    ended_at = max((at for *_, at in rows if at is not None), default=batch.created_at)
    num_open = sum(counts.get(status, 0) for status in UNFINISHED)
    num_done = counts.get("completed", 0) + counts.get("incomplete", 0)
    num_failed = counts.get("failed", 0)
    status = "in_progress" if num_open else "cancelled" if batch.cancelled_at else "completed"
    has_errors = num_failed or counts.get("cancelled")
    times = {f"{'failed' if batch.errors else status}_at": int(ended_at)} if not num_open else {}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "created_at": int(batch.created_at),
        "in_progress_at": int(batch.created_at),
        "status": "failed" if batch.errors else status,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "metadata": batch.labels,
        "request_counts": {"total": sum(counts.values()), "completed": num_done, "failed": num_failed},
        "output_file_id": results_id(batch, False) if num_done and not num_open else None,
        "error_file_id": results_id(batch, True) if has_errors and not num_open else None,
        **times,
    }
