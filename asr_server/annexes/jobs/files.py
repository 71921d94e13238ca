"""OpenAI's files: the lines of batches, recordings that these name, and what came of them."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, BinaryIO, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from starlette.responses import JSONResponse, Response, StreamingResponse

from asr_server import metrics
from asr_server.annexes.jobs.routes import jobs_of
from asr_server.annexes.jobs.rows import Batch, Content, File, Job
from asr_server.annexes.jobs.service import owner_of
from asr_server.annexes.jobs.store import Store, page, storing
from asr_server.api.request import read_fields
from asr_server.api.state import get_state, metered, require_key
from asr_server.api.upload import Form, read_form
from asr_server.config import MIB
from asr_server.errors import NotFound
from asr_server.formats.render import FORMATS, JSON

router = APIRouter(prefix="/v1/files", dependencies=[Depends(require_key)], include_in_schema=False)

MAX_PAGE: Final = 10_000
PIECE_BYTES: Final = MIB // 4
JSON_FORMATS: Final = frozenset(name for name, each in FORMATS.items() if each.media_type == JSON)
_SEPARATORS: Final = ("\x85", "\u2028", "\u2029")  # where some readers end a line
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
    key = metrics.current_request_stats().key
    form = Form(state.settings.max_upload_bytes, state.uploads)
    with metered(request), state.admission.enter(key), closing(form):
        await read_form(request, form, state.settings.max_upload_bytes, state.reading_turns)
        file = File(
            id=f"file-{uuid.uuid4().hex}",
            owner=owner_of(request),
            purpose=read_fields(form.fields, FileFields).purpose,
            filename=form.sent_name or "upload",
            num_bytes=form.upload.num_bytes,
        )
        async with jobs.store.keeping(file.id, await form.upload.source(), file.num_bytes):
            await jobs.store.run(jobs.add, file)
    return JSONResponse(_body(file))


@router.get("")
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    after: str = "",
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    files, has_more = await store.run(page, File, owner, limit, after, order == "desc")
    return JSONResponse(page_body([_body(file) for file in files], has_more))


def page_body(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first_id, "last_id": last_id, "has_more": has_more}


@router.get("/{id}")
async def get_file(request: Request, id: str) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    if (batch_id := _batch_of(id)) is None:
        return JSONResponse(_body(await store.find(File, owner, id)))
    batch = await store.find(Batch, owner, batch_id)
    results = {"id": id, "purpose": "batch_output", "filename": f"{id}.jsonl", "num_bytes": 0}
    return JSONResponse(_body(File(**results, created_at=batch.created_at)))


@router.get("/{id}/content", response_model=None)
async def get_content(request: Request, id: str) -> Response:
    store, owner = jobs_of(request).store, owner_of(request)
    if (batch_id := _batch_of(id)) is not None:
        batch = await store.find(Batch, owner, batch_id)
        return StreamingResponse(_results(store, batch, _RESULTS[id[-7:]]), media_type="application/jsonl")
    file = await store.find(File, owner, id)
    with storing():
        try:
            content = await asyncio.to_thread(store.path_of(id).open, "rb")
        except FileNotFoundError:
            raise NotFound(f"There is no '{id}': it was deleted.") from None
    headers = {"content-length": str(file.num_bytes)}
    return StreamingResponse(_pieces(content), headers=headers, media_type="application/octet-stream")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from iter(partial(file.read, PIECE_BYTES), b"")


@router.delete("/{id}")
async def delete_file(request: Request, id: str) -> Response:
    """Jobs that have the recording keep it until they are done."""
    store = jobs_of(request).store
    file = await store.find(File, owner_of(request), id)
    hide = update(File).where(File.number == file.number).values(is_listed=False)
    await store.run(lambda session: session.execute(hide))
    await store.collect(file.id)
    return JSONResponse({"id": id, "object": "file", "deleted": True})


def _body(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


# -- What came of a batch ------------------------------------------------------------------------------------


def results_id(batch: Batch, is_of_errors: bool) -> str:
    return f"file-{batch.id}-{'errors' if is_of_errors else 'output'}"


def _batch_of(id: str) -> str | None:
    return id[5:-7] if id[-7:] in _RESULTS and id.startswith("file-batch_") else None


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
        body = msgspec.Raw(content.body) if is_json else content.body.decode()
        response = {"status_code": content.status_code, "request_id": job.id, "body": body}
    line = {"id": f"batch_req_{job.id}", "custom_id": job.custom_id, "response": response, "error": error}
    text = msgspec.json.encode(line)
    for separator in _SEPARATORS:
        text = text.replace(separator.encode(), json.dumps(separator).strip('"').encode())
    return text + b"\n"
