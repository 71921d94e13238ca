"""300 clients that trickle their uploads and 300 that do not read their replies, beside one that behaves."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest
from starlette.responses import StreamingResponse

from asr_server.config import MIB, Settings
from tests.api.raw_client import RawClient
from tests.api.running_app import RunningApp, run_app, until

NUM_EACH = 300
PATIENT = replace(Settings(), client_grace_s=8.0)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield bytes(65536)
        await asyncio.sleep(0)  # to a client that is gone uvicorn sends without ever waiting


async def median_s(app: RunningApp) -> float:
    times = []
    for _ in range(5):
        started_at = time.monotonic()
        assert await app.still_works()
        times.append(time.monotonic() - started_at)
    return sorted(times)[2]


async def serve_crowd(app: RunningApp, usual_s: float) -> None:
    clients = [await RawClient.connect(app.host, app.port, 4096) for _ in range(2 * NUM_EACH)]
    for index, client in enumerate(clients):
        if index < NUM_EACH:
            client.begin_upload()
            client.send(b"x" * 1000)
        else:
            client.ask("/endless")
    await until(lambda: len(app.server.server_state.tasks) == 2 * NUM_EACH)
    assert await median_s(app) < 5 * usual_s + 0.5
    async with asyncio.timeout(60):
        while len(app.server.server_state.connections) > 1:  # the one that behaves
            await asyncio.sleep(0.1)
    for client in clients:
        await client.close()


@pytest.mark.trial
async def test_600_slow_clients_leave_the_others_their_time_and_nothing_behind() -> None:
    async with run_app(PATIENT) as app:

        @app.app.get("/endless")
        async def reply() -> StreamingResponse:
            return StreamingResponse(endless())

        usual_s, process = await median_s(app), psutil.Process()
        handles_and_threads = process.num_fds(), process.num_threads()
        memory: list[int] = []
        for _ in range(2):  # the first time the process grows to what so many connections need
            await serve_crowd(app, usual_s)
            gc.collect()
            assert (process.num_fds(), process.num_threads()) == handles_and_threads
            memory.append(process.memory_full_info().uss)
        assert memory[1] - memory[0] < 16 * MIB
        assert app.app.state.server.upload_memory.num_bytes == 0
