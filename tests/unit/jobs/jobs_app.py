"""The API with jobs, before a fake replica."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from asr_server.annexes.jobs.service import Jobs
from tests.support.embedded import embedded
from tests.support.fake_replica import Say
from tests.support.until import until
from tests.unit.api.running_app import MODEL, SECOND, RunningApp, number_of_the_chunk, run_app

URL = "/v1/audio/transcriptions"
LIMIT_S = 100  # of a wait for the end of a job


@asynccontextmanager
async def run_with_jobs(
    folder: Path, answer: Say = number_of_the_chunk, **values: Any
) -> AsyncIterator[RunningApp]:
    settings = embedded(**{"jobs_dir": str(folder)} | values)
    async with run_app(settings, answer, languages=("en", "de")) as app:
        yield app


def jobs_of(app: RunningApp) -> Jobs:
    jobs: Jobs = app.app.state.jobs
    return jobs


async def post(
    app: RunningApp, file: bytes = SECOND, /, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    """Send a recording as a job's."""
    data = MODEL | {"language": "en", "background": "true"} | fields
    return await app.client.post(URL, files={"file": file}, data=data, headers=headers)


async def hold(app: RunningApp, file: bytes = SECOND, num_chunks: int = 1) -> str:
    """Return the id of a new job whose chunks the replica holds."""
    app.replica.holding = True
    id = str((await post(app, file)).json()["id"])
    await until(lambda: len(app.replica.held) == num_chunks)
    return id


async def finished(app: RunningApp, id: str, **headers: str) -> dict[str, Any]:
    """Return the job once it has ended."""
    while True:
        answer = await app.client.get(f"{URL}/{id}?wait=30", headers=headers, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        if job["status"] not in ("queued", "in_progress"):
            return job


async def content(app: RunningApp, id: str) -> httpx.Response:
    return await app.client.get(f"{URL}/{id}/content")
