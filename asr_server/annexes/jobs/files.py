"""OpenAI's files: the lines of batches, recordings that these name, and what came of them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, RowMapping, select
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from asr_server import metrics
from asr_server.annexes.jobs.routes import jobs_of
from asr_server.annexes.jobs.service import Jobs, owner_of
from asr_server.annexes.jobs.store import Job, Store
from asr_server.api.request import read_fields
from asr_server.api.state import get_state, metered, require_key
from asr_server.api.upload import Form, read_form
from asr_server.formats.render import FORMATS, JSON

router = APIRouter(prefix="/v1/files", dependencies=[Depends(require_key)], include_in_schema=False)

MAX_PAGE: Final = 10_000
LINES_AT_ONCE: Final = 50  # of results, which may be long
JSON_FORMATS: Final = frozenset(name for name, each in FORMATS.items() if each.media_type == JSON)
_RESULTS: Final = {  # of a batch, by the end of the file's id
    "-output": ("completed", "incomplete"),
    "-errors": ("failed", "cancelled"),
}


class FileFields(BaseModel):
    model_config = ConfigDict(extra="forbid")

    purpose: Literal["batch", "user_data"]


@router.post("")
async def upload(request: Request) -> Response:
    jobs, state = jobs_of(request), get_state(request)
    owner, key = owner_of(request), metrics.current_request_stats().key
    form = Form(state.settings.max_upload_bytes, state.uploads)
    with metered(request), state.admission.enter(key), closing(form):
        await read_form(request, form, state.settings.max_upload_bytes, state.reading_turns)
        row = {
            "id": f"file-{uuid.uuid4().hex}",
            "owner": owner,
            "purpose": read_fields(form.fields, FileFields).purpose,
            "filename": form.sent_name or "upload",
            "num_bytes": form.upload.num_bytes,
            "created_at": time.time(),
        }
        path, source = jobs.store.upload_of(str(row["id"])), await form.upload.source()

        def work(connection: Connection) -> None:
            jobs.require_room(connection, owner, 0, form.upload.num_bytes)
            connection.execute(jobs.store.table("files").insert().values(row))

        async with jobs.store.keeping(path, source, form.upload.num_bytes):
            await jobs.store.run(work)
    return JSONResponse(_body(row))


@router.get("")
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    after: str = "",
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    rows, has_more = await store.page("files", owner, limit, after, is_descending=order == "desc")
    return JSONResponse(page_body([_body(row) for row in rows], has_more))


def page_body(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first_id, "last_id": last_id, "has_more": has_more}


@router.get("/{id}")
async def get_file(request: Request, id: str) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    if (batch := _batch_of(id)) is None:
        return JSONResponse(_body(await store.row("files", owner, id)))
    row = await store.row("batches", owner, batch)
    body = {"id": id, "purpose": "batch_output", "filename": f"{id}.jsonl", "num_bytes": 0}
    return JSONResponse(_body(body | {"created_at": row["created_at"]}))


@router.get("/{id}/content", response_model=None)
async def get_content(request: Request, id: str) -> Response:
    jobs, owner = jobs_of(request), owner_of(request)
    if (batch := _batch_of(id)) is None:
        await jobs.store.row("files", owner, id)
        return FileResponse(jobs.store.upload_of(id), media_type="application/octet-stream")
    await jobs.store.row("batches", owner, batch)
    return StreamingResponse(_results(jobs, batch, _RESULTS[id[-7:]]), media_type="application/jsonl")


@router.delete("/{id}")
async def delete_file(request: Request, id: str) -> Response:
    store = jobs_of(request).store
    await store.row("files", owner_of(request), id)
    await store.delete("files", id)
    return JSONResponse({"id": id, "object": "file", "deleted": True})


def _body(row: dict[str, Any] | RowMapping) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["num_bytes"],
        "created_at": int(row["created_at"]),
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
    }


# -- What came of a batch ------------------------------------------------------------------------------------


def results_id(batch: str, is_of_errors: bool) -> str:
    return f"file-{batch}-{'errors' if is_of_errors else 'output'}"


def _batch_of(id: str) -> str | None:
    return id[5:-7] if id[-7:] in _RESULTS and id.startswith("file-batch_") else None


async def _results(jobs: Jobs, batch: str, statuses: tuple[str, ...]) -> AsyncIterator[str]:
    """Yield a line for each of its jobs with one of these statuses, in the order of the input."""
    after = 0
    while page := await jobs.store.run(partial(_page_of, jobs.store, batch, statuses, after)):
        for job, status_code, body in page:
            yield _line(job, status_code, body)
        await jobs.store.mark_read(*(job for job, *_ in page))
        after = page[-1][0].number


def _page_of(
    store: Store, batch: str, statuses: tuple[str, ...], after: int, connection: Connection
) -> list[tuple[Job, int | None, bytes]]:
    jobs, contents = store.table("jobs"), store.table("contents")
    conditions = (jobs.c.batch == batch, jobs.c.status.in_(statuses), jobs.c.number > after)
    found = {job.number: job for job in store.jobs_of(connection, *conditions, limit=LINES_AT_ONCE)}
    replies = select(contents.c.job, contents.c.status_code, contents.c.body).where(contents.c.job.in_(found))
    by_job = {number: (status_code, body) for number, status_code, body in connection.execute(replies)}
    return [(job, *by_job.get(number, (None, b""))) for number, job in found.items()]


def _line(job: Job, status_code: int | None, body: bytes) -> str:
    response = error = None
    if status_code is None:
        error = {"code": "batch_cancelled", "message": "The batch was cancelled before this line was done."}
    else:
        is_json = status_code >= HTTPStatus.BAD_REQUEST or job.response_format in JSON_FORMATS
        content = json.loads(body) if is_json else body.decode()
        response = {"status_code": status_code, "request_id": job.id, "body": content}
    line = {"id": f"batch_req_{job.id}", "custom_id": job.custom_id, "response": response, "error": error}
    return json.dumps(line) + "\n"
