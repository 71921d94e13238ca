"""Files and batches in OpenAI's shape, by its own client in strict mode."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from openai.types import Batch

from asr_server.annexes.jobs import store
from tests.support.api_fixtures import strict_client
from tests.support.until import until
from tests.unit.api.running_app import SECOND, THREE_CHUNKS, RunningApp
from tests.unit.jobs.jobs_app import run_with_jobs

ENDPOINT = "/v1/audio/transcriptions"


def line(custom_id: str, file_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "whisper-1", "language": "en", "file_id": file_id} | fields
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


async def start(client: AsyncOpenAI, lines: list[dict[str, Any]]) -> Batch:
    text = "\n".join(map(json.dumps, lines))
    file = await client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=ENDPOINT,  # type: ignore[arg-type]  # theirs has no recordings
        completion_window="24h",
        metadata={"case": "7"},
    )


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    while batch.status == "in_progress":
        await asyncio.sleep(0.01)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def half_done(app: RunningApp, client: AsyncOpenAI) -> Batch:
    """Start a batch of two lines; the engine holds the second."""
    file = (await client.files.create(file=("a.wav", SECOND), purpose="user_data")).id
    app.replica.holding = True
    batch = await start(client, [line("a", file), line("b", file)])
    await until(lambda: len(app.replica.held) == 2)
    app.replica.release(app.replica.held[0])
    while (await client.batches.retrieve(batch.id)).request_counts.completed == 0:  # type: ignore[union-attr]
        await asyncio.sleep(0.005)
    return batch


async def results(client: AsyncOpenAI, id: str | None) -> list[dict[str, Any]]:
    assert id is not None
    described = await client.files.retrieve(id)
    assert (described.id, described.purpose) == (id, "batch_output")
    return [json.loads(each) for each in (await client.files.content(id)).text.splitlines()]


async def test_files_are_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        files = [await client.files.create(file=(f"{n}.wav", SECOND), purpose="user_data") for n in range(3)]
        assert [(file.filename, file.bytes) for file in files] == [
            (f"{n}.wav", len(SECOND)) for n in range(3)
        ]
        assert (await client.files.retrieve(files[0].id)) == files[0]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == [f.id for f in files]
        assert (await client.files.content(files[0].id)).content == SECOND
        assert (await client.files.delete(files[0].id)).deleted
        with pytest.raises(NotFoundError):
            await client.files.content(files[0].id)
        assert len(list((tmp_path / "files").iterdir())) == 2
        (tmp_path / "files" / files[1].id).unlink()
        with pytest.raises(NotFoundError):
            await client.files.content(files[1].id)


async def test_files_and_batches_take_of_the_room_for_jobs(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path, max_jobs=4) as app, strict_client(app.url) as client:
        file = (await client.files.create(file=("a.wav", SECOND), purpose="user_data")).id
        with pytest.raises(RateLimitError):  # with the lines' file, five
            await start(client, [line("a", file), line("b", file)])
        await start(client, [line("a", file), ""])  # type: ignore[list-item]
        with pytest.raises(RateLimitError):
            await client.files.create(file=("a.wav", SECOND), purpose="user_data")


async def test_a_line_is_a_request_and_its_answer_the_endpoints(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        short, long = [
            (await client.files.create(file=("a.wav", file), purpose="user_data")).id
            for file in (SECOND, THREE_CHUNKS)
        ]
        words = {"response_format": "verbose_json", "timestamp_granularities": ["word"], "temperature": 0.2}
        lines = [line("a", short), line("b", long, response_format="srt"), line("c", long, **words)]
        batch = await start(client, [*lines, line("d", short, track="2")])
        await client.files.delete(long)  # the lines have it
        batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert (batch.status, batch.metadata) == ("completed", {"case": "7"})
        answers = await results(client, batch.output_file_id)
        assert [each["custom_id"] for each in answers] == ["a", "b", "c"]
        direct = [
            await app.post(SECOND, language="en"),
            await app.post(THREE_CHUNKS, language="en", response_format="srt"),
            await app.post(
                THREE_CHUNKS,
                language="en",
                **{
                    "response_format": "verbose_json",
                    "timestamp_granularities[]": "word",
                    "temperature": "0.2",
                },
            ),
        ]
        bodies = [each["response"]["body"] for each in answers]
        assert bodies == [direct[0].json(), direct[1].text, direct[2].json()]
        (failed,) = await results(client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("d", 400)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
        assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]


async def test_a_batch_with_a_line_that_cannot_be_read_makes_no_job(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        file = (await client.files.create(file=("a.wav", SECOND), purpose="user_data")).id
        wrong = [
            line("a", file) | {"url": "/v1/chat/completions"},
            line("b", "file-of-nobody"),
            line("c", file, temperature=2),
            line("c", file),
            {"custom_id": "d"},
            line("e", file, model="none"),
        ]
        batch = await start(client, [line("good", file), *wrong])
        assert batch.status == "failed"
        assert batch.errors is not None
        listed = [(each.line, each.param) for each in batch.errors.data or []]
        assert listed == [
            (2, "url"),
            (3, "file_id"),
            (4, "temperature"),
            (5, "custom_id"),
            (6, None),
            (7, "model"),
        ]
        assert (await app.client.get(ENDPOINT)).json()["data"] == []
        with pytest.raises(BadRequestError):
            await client.batches.create(
                input_file_id=file, endpoint="/v1/embeddings", completion_window="24h"
            )


async def test_what_is_no_batch_is_refused_and_any_name_of_a_line_is_taken(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        recording = await client.files.create(file=("a.wav", SECOND + b"\xff"), purpose="user_data")
        asked = {"input_file_id": recording.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        for body, said in ((asked, "is no text"), (asked | {"metadata": {"a": "b" * 100_000}}, "limit")):
            refused = await app.client.post("/v1/batches", json=body)
            assert refused.status_code == 400
            assert said in refused.json()["error"]["message"]
        name = "line \u2028 separated"
        odd = json.dumps(line(name, recording.id), ensure_ascii=False).encode()
        file = await client.files.create(file=("lines.jsonl", odd), purpose="batch")
        batch = (await app.client.post("/v1/batches", json=asked | {"input_file_id": file.id})).json()
        done = await ended(client, await client.batches.retrieve(batch["id"]))
        assert [each["custom_id"] for each in await results(client, done.output_file_id)] == [name]


async def test_a_cancelled_batch_keeps_what_was_done(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        batch = await half_done(app, client)
        for file in (await client.files.list()).data:
            await client.files.delete(file.id)
        assert len(list((tmp_path / "files").iterdir())) == 1  # what is under way keeps its recording
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelled"
        assert len(await results(client, batch.output_file_id)) == 1
        (lost,) = await results(client, batch.error_file_id)
        assert lost["error"]["code"] == "batch_cancelled"
        assert list((tmp_path / "files").iterdir()) == []


async def test_a_batch_goes_on_after_the_end_of_the_server_and_is_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        batch = await half_done(app, client)
    monkeypatch.setattr(store, "SWEEP_S", 0.005)
    async with run_with_jobs(tmp_path, jobs_keep_s=0.01) as app, strict_client(app.url) as client:
        app.replica.holding = True
        while (await client.files.list()).data:  # they are old: so is what is done of the batch
            await asyncio.sleep(0.005)
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 1  # type: ignore[union-attr]
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        batch = await ended(client, batch)
        assert [each["custom_id"] for each in await results(client, batch.output_file_id)] == ["a", "b"]
    async with run_with_jobs(tmp_path, jobs_keep_s=0.01) as app, strict_client(app.url) as client:
        while (await client.batches.list()).data:
            await asyncio.sleep(0.005)
