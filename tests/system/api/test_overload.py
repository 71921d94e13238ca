"""More requests than places: who is turned away comes back when there is one."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from asr_server.core import ChunkId
from tests.conftest import run_server
from tests.contract.official_client import SPOKEN, transcribe
from tests.support.embedded import embedded
from tests.support.raw_client import RawClient
from tests.support.until import until
from tests.unit.api.running_app import SECOND, RunningApp, run_app
from tests.unit.api.sample_files import sound_file

pytestmark = pytest.mark.slow

FOUR_PLACES = replace(embedded(), max_concurrent_requests=4)


@asynccontextmanager
async def each_request_takes(app: RunningApp, request_s: float) -> AsyncIterator[None]:
    app.replica.holding = True

    async def release() -> None:
        started_at: dict[ChunkId, float] = {}
        while True:
            now = time.monotonic()
            for submit in app.replica.held:
                if now - started_at.setdefault(submit.id, now) >= request_s:
                    app.replica.release(submit)
            await asyncio.sleep(0.01)

    releasing = asyncio.create_task(release())
    yield
    releasing.cancel()


async def test_official_clients_get_through_a_burst_of_30_on_4_places() -> None:
    async with (
        run_app(FOUR_PLACES) as app,
        AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=2) as client,
        each_request_takes(app, 0.5),
    ):
        outcomes = await asyncio.gather(
            *(transcribe(client, SECOND) for _ in range(30)), return_exceptions=True
        )
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert all(isinstance(outcome, openai.RateLimitError) for outcome in failed)
        assert len(failed) < 15


@pytest.mark.trial
async def test_300_official_clients_at_once_on_256_places_are_all_answered() -> None:
    file = sound_file(np.tile(SPOKEN.samples, 2))
    http_client = DefaultAsyncHttpxClient(limits=httpx2.Limits(max_connections=300))
    with run_server("--dtype", "float32") as server:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=2, timeout=600, http_client=http_client
        ) as client:
            for _ in range(3):
                answers = await asyncio.gather(*(transcribe(client, file) for _ in range(300)))
                assert len({answer.text for answer in answers}) == 1


async def test_uploads_that_have_not_arrived_yet_take_no_place() -> None:
    async with run_app(FOUR_PLACES) as app:
        clients = [await RawClient.connect(app.host, app.port) for _ in range(8)]
        for client in clients:
            client.begin_upload()
        await until(lambda: len(app.server.server_state.tasks) == 8)
        assert await app.still_works()
        for client in clients:
            await client.close()
