"""OpenAI's files and batches, read off the jobs: a line is a job, and a batch has no state of its own."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from asr_server import metrics
from asr_server.annexes.jobs.routes import MAX_PAGE, jobs_of
from asr_server.annexes.jobs.rows import UNFINISHED, Batch, Content, File, Job
from asr_server.annexes.jobs.service import Jobs, owner_of
from asr_server.annexes.jobs.store import Store, find, page, storing
from asr_server.api.models import Models
from asr_server.api.request import parse_request, read_fields, read_small_body
from asr_server.api.schemas import Metadata
from asr_server.api.state import get_state, metered, models_of, require_key
from asr_server.api.upload import Form, read_form
from asr_server.config import MIB, naming
from asr_server.errors import InvalidValue, NotFound, RequestError
from asr_server.formats.render import FORMATS, JSON

MAX_FILES: Final = 10_000  # of a page
JSON_FORMATS: Final = frozenset(name for name, each in FORMATS.items() if each.media_type == JSON)
_RESULTS_ID: Final = re.compile(r"file-(batch_\w+)-(output|errors)")
_STATUSES: Final = {"output": ("completed", "incomplete"), "errors": ("failed", "cancelled")}
MAX_BODY_BYTES: Final = 64 * 1024
MAX_INPUT_BYTES: Final = 64 * MIB
MAX_LINE_CHARS: Final = 64 * 1024  # some thousand fields: more would hold up the event loop
MAX_ERRORS: Final = 100  # of lines, that are listed
Endpoint = Literal["/v1/audio/transcriptions", "/v1/audio/translations"]

files = APIRouter(prefix="/v1/files", dependencies=[Depends(require_key)], include_in_schema=False)
batches = APIRouter(prefix="/v1/batches", dependencies=[Depends(require_key)], include_in_schema=False)


class FileFields(BaseModel, extra="forbid"):
    purpose: Literal["batch", "user_data"]


@files.post("")
async def upload(request: Request) -> Response:
    jobs, state = jobs_of(request), get_state(request)
    key = metrics.current_request_stats().key
    form = Form(state.settings.max_upload_bytes, state.uploads)
    with metered(request), state.admission.enter(key), closing(form):
        await read_form(request, form)
        file = File(
            id=f"file-{uuid.uuid4().hex}",
            owner=owner_of(request),
            purpose=read_fields(form.fields, FileFields).purpose,
            filename=form.sent_name or "upload",
            num_bytes=form.upload.num_bytes,
        )
        async with jobs.store.keeping(file.id, await form.upload.source(), file.num_bytes):
            await jobs.store.run(jobs.add, file)
    return JSONResponse(_file_body(file))


@files.get("")
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_FILES)] = MAX_FILES,
    after: str = "",
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    rows, about = await store.run(page, File, owner, limit, after, order == "desc")
    return JSONResponse({"object": "list", "data": [_file_body(file) for file in rows], **about})


@files.get("/{id}")
async def get_file(request: Request, id: str) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    if (results_of := _RESULTS_ID.fullmatch(id)) is None:
        return JSONResponse(_file_body(await store.run(find, File, owner, id)))
    batch = await store.run(find, Batch, owner, results_of[1])
    results = {"id": id, "purpose": "batch_output", "filename": f"{id}.jsonl", "num_bytes": 0}
    return JSONResponse(_file_body(File(**results, created_at=batch.created_at)))


@files.get("/{id}/content", response_model=None)
async def get_content(request: Request, id: str) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    if results_of := _RESULTS_ID.fullmatch(id):
        batch = await store.run(find, Batch, owner, results_of[1])
        lines = _results(store, batch, _STATUSES[results_of[2]])
        return StreamingResponse(lines, media_type="application/jsonl")
    path = store.files / (await store.run(find, File, owner, id)).id
    with storing():
        try:
            about = await asyncio.to_thread(path.stat)
        except FileNotFoundError:
            raise NotFound(f"There is no '{id}': it was deleted.") from None
    return FileResponse(path, stat_result=about, media_type="application/octet-stream")


@files.delete("/{id}")
async def delete_file(request: Request, id: str) -> Response:
    """Jobs that have the recording keep it until they are done."""
    store = jobs_of(request).store
    file = await store.run(find, File, owner_of(request), id)
    hide = update(File).where(File.number == file.number).values(is_listed=False)
    await store.run(lambda session: session.execute(hide))
    await store.collect(file.id)
    return JSONResponse({"id": id, "object": "file", "deleted": True})


def _file_body(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


# -- Batches -------------------------------------------------------------------------------------------------


class BatchFields(BaseModel, extra="forbid"):
    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field("24h", max_length=16)
    metadata: Metadata | None = None


class LineFields(BaseModel, extra="forbid"):
    custom_id: str = Field(max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@batches.post("")
async def create_batch(request: Request) -> Response:
    """Make a job of each line; where one cannot be read, make none."""
    jobs, owner, fields = jobs_of(request), owner_of(request), await _fields_of(request)
    with metered(request):
        source = await jobs.store.run(find, File, owner, fields.input_file_id)
        lines = await _lines_of(jobs, source)
        listed = select(File.id).where(File.owner == owner, File.is_listed)
        own_files = await jobs.store.run(lambda session: set(session.scalars(listed)))
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            labels=fields.metadata or {},
            errors=[],
            **fields.model_dump(include={"endpoint", "input_file_id", "completion_window"}),
        )
        models, names, new = models_of(request), set[str](), list[Job]()
        for number, line in lines:
            try:
                new.append(_job_of(line, batch, models, own_files, names))
            except (RequestError, ValidationError) as error:
                batch.errors.append(_line_error(number, error))
                if len(batch.errors) == MAX_ERRORS:
                    break
            await asyncio.sleep(0)
        await jobs.store.run(jobs.add, batch, *([] if batch.errors else new))
    jobs.runner.wake()
    return JSONResponse(await _batch_body(jobs.store, batch))


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
        content = await asyncio.to_thread((jobs.store.files / source.id).read_bytes)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidValue("The file is no text: a batch has lines of JSON.", "input_file_id") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > jobs.settings.max_jobs:
        raise InvalidValue(f"The batch has {len(lines)} lines: {naming('max_jobs')}.", "input_file_id")
    return lines


def _line_error(number: int, error: RequestError | ValidationError) -> dict[str, Any]:
    if isinstance(error, RequestError):
        return {"code": error.code, "line": number, "message": error.message, "param": error.param}
    message = str(error.errors()[0]["msg"])
    return {"code": "invalid_json_line", "line": number, "message": message, "param": None}


def _job_of(line: str, batch: Batch, models: Models, files: set[str], names: set[str]) -> Job:
    """Return a line's job, and add its name to `names`. Raises RequestError, ValidationError."""
    if len(line) > MAX_LINE_CHARS:
        raise InvalidValue(f"A line has at most {MAX_LINE_CHARS} characters.")
    fields = LineFields.model_validate_json(line)
    if fields.url != batch.endpoint:
        raise InvalidValue(f"'url' must be the batch's endpoint, {batch.endpoint}.", "url")
    if fields.custom_id in names:
        raise InvalidValue("'custom_id' was given before.", "custom_id")
    names.add(fields.custom_id)
    file_id = fields.body.pop("file_id", None)
    if not isinstance(file_id, str) or file_id not in files:
        raise InvalidValue("'file_id' must name a recording that was sent to /v1/files.", "file_id")
    pairs = [("model", str(fields.body.pop("model", ""))), *_pairs(fields.body)]
    task = "translate" if batch.endpoint.endswith("translations") else "transcribe"
    request = parse_request(task, pairs, models)
    return Job(
        id=f"job_{uuid.uuid4().hex}",
        owner=batch.owner,
        file=file_id,
        task=request.options.task,
        model=request.fields.model,
        response_format=request.fields.response_format,
        fields=pairs,
        batch=batch.id,
        custom_id=fields.custom_id,
    )


def _pairs(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a form for those of a JSON object."""
    for name, value in body.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                text = each if isinstance(each, str) else json.dumps(each)
                yield f"{name}[]" if isinstance(value, list) else name, text


@batches.get("")
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20, after: str = ""
) -> Response:
    store = jobs_of(request).store
    rows, about = await store.run(page, Batch, owner_of(request), limit, after, is_descending=True)
    data = [await _batch_body(store, batch) for batch in rows]
    return JSONResponse({"object": "list", "data": data, **about})


@batches.get("/{id}")
async def get_batch(request: Request, id: str) -> Response:
    store = jobs_of(request).store
    return JSONResponse(await _batch_body(store, await store.run(find, Batch, owner_of(request), id)))


@batches.post("/{id}/cancel")
async def cancel_batch(request: Request, id: str) -> Response:
    jobs = jobs_of(request)
    batch = await jobs.store.run(find, Batch, owner_of(request), id)
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


async def _batch_body(store: Store, batch: Batch) -> dict[str, Any]:
    query = select(Job.status, func.count(), func.max(Job.completed_at)).where(Job.batch == batch.id)
    rows = await store.run(lambda session: session.execute(query.group_by(Job.status)).all())
    counts = {status: count for status, count, _ in rows}
    ended_at = max((at for *_, at in rows if at is not None), default=batch.created_at)
    is_open = any(status in counts for status in UNFINISHED)
    num_done, num_failed = counts.get("completed", 0) + counts.get("incomplete", 0), counts.get("failed", 0)
    ended_as = "failed" if batch.errors else "cancelled" if batch.cancelled_at else "completed"
    has_errors = num_failed or counts.get("cancelled")
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "created_at": int(batch.created_at),
        "in_progress_at": int(batch.created_at),
        "status": "in_progress" if is_open else ended_as,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "metadata": batch.labels,
        "request_counts": {"total": sum(counts.values()), "completed": num_done, "failed": num_failed},
        "output_file_id": f"file-{batch.id}-output" if num_done and not is_open else None,
        "error_file_id": f"file-{batch.id}-errors" if has_errors and not is_open else None,
    } | ({} if is_open else {f"{ended_as}_at": int(ended_at)})


async def _results(store: Store, batch: Batch, statuses: Sequence[str]) -> AsyncIterator[bytes]:
    """Yield a line for each of its jobs with one of these statuses, in the order of the input."""
    wanted = select(Job.number).where(Job.batch == batch.id, Job.status.in_(statuses)).order_by(Job.number)
    for number in await store.run(lambda session: list(session.scalars(wanted))):
        yield await store.run(_line, number)


def _line(session: Session, number: int) -> bytes:
    job, content = session.get(Job, number), session.get(Content, number)
    if job is None:  # deleted meanwhile
        return b""
    response = error = None
    if content is None:
        error = {"code": "batch_cancelled", "message": "The batch was cancelled before this line was done."}
    else:
        is_json = content.status_code >= HTTPStatus.BAD_REQUEST or job.response_format in JSON_FORMATS
        body = json.loads(content.body) if is_json else content.body.decode()
        response = {"status_code": content.status_code, "request_id": job.id, "body": body}
    line = {"id": f"batch_req_{job.id}", "custom_id": job.custom_id, "response": response, "error": error}
    return json.dumps(line).encode() + b"\n"  # in ASCII: some readers end a line at other signs too
