"""Hundreds of clients that trickle uploads, do not read or send nothing, and others beside them."""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from asr_server.config import MIB
from asr_server.protocols.http import TICK_S
from asr_server.server.app import FILE_THREADS
from tests.conftest import Server, run_server
from tests.support.raw_client import RawClient
from tests.support.speech import say
from tests.support.until import until
from tests.unit.api.sample_files import sound_file

NUM_EACH = 300
LARGE_REPLY = "/static-offline-docs/swagger-ui-bundle.js"  # 1.5 MB
MAX_FRAGMENTS_BYTES = 24 * MIB
"""The first such crowd leaves some 14 MB of half-empty pages, later ones 1 or 2; without releasing 86."""
Join = Callable[[Server], Awaitable[RawClient]]
RECORDING = sound_file(say("2718").samples)


@pytest.mark.trial
async def test_600_slow_clients_leave_the_others_their_time_and_nothing_behind(tmp_path: Path) -> None:
    options = ("--client-grace-s", "4", "--keep-alive-s", "3", "--log-level", "warning")
    with run_server(*options, TMPDIR=str(tmp_path)) as server:
        process = psutil.Process(server.process.pid)
        usual_s = await usual_time_s(server)
        async with crowd(server, 10):  # what is loaded at its first use is there from then on
            before, files = await settled(process), left_in(tmp_path, process)
        async with crowd(server, NUM_EACH):
            assert await usual_time_s(server) < 3 * usual_s + 0.5
            await until(lambda: process.num_fds() <= before.num_fds, 60)  # all have been shown out
        await until(lambda: process.memory_full_info().uss < before.uss_bytes + MAX_FRAGMENTS_BYTES, 30)
        assert process.num_fds() <= before.num_fds
        assert process.num_threads() <= before.num_threads + FILE_THREADS + 2  # pools grow to their bounds
        assert left_in(tmp_path, process) == files


@pytest.mark.trial
async def test_no_crowd_of_one_address_keeps_32_uploads_from_their_usual_time() -> None:
    """Each crowd by itself, one after another, and all of them together."""

    async def silent(server: Server) -> RawClient:
        url = httpx.URL(server.url)
        return await RawClient.connect(url.host, url.port or 0)

    trickling, stalled = partial(slow_client, reads=True), partial(slow_client, reads=False)
    crowds: dict[str, list[Join]] = {
        "silent": [silent] * 1100,
        "trickling": [trickling] * NUM_EACH,
        "stalled": [stalled] * NUM_EACH,
        "many trickling": [trickling] * 1100,
        "together": [*[silent] * 1100, *[trickling] * NUM_EACH, *[stalled] * NUM_EACH],
    }
    limits = ("--client-grace-s", "100")  # nobody is shown out but for others
    with run_server("--log-level", "warning", *limits) as server:
        await time_of_32_s(server)  # what is loaded at its first use
        usual_s = await time_of_32_s(server)
        times_s = {name: await time_beside_s(server, crowd) for name, crowd in crowds.items()}
    assert {name: time_s for name, time_s in times_s.items() if time_s > 1.5 * usual_s + 0.5} == {}, usual_s
    print(usual_s, times_s)


async def time_beside_s(server: Server, crowd: list[Join]) -> float:
    """The time that 32 uploads take beside these clients, once the server has looked at what they do."""
    clients = [await join(server) for join in crowd]
    await asyncio.sleep(3 * TICK_S)
    try:
        return await time_of_32_s(server)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def time_of_32_s(server: Server) -> float:
    """From the first connection to the last answer, all begun at once."""
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        started_at = time.monotonic()
        replies = await asyncio.gather(*(upload(client) for _ in range(32)))
        assert [reply.status_code for reply in replies] == [200] * 32
        return time.monotonic() - started_at


@asynccontextmanager
async def crowd(server: Server, num_each: int) -> AsyncIterator[None]:
    clients: list[RawClient] = []
    try:
        clients += [await slow_client(server, index % 2 == 0) for index in range(2 * num_each)]
        yield
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def slow_client(server: Server, reads: bool) -> RawClient:
    """One that uploads a few bytes and then stalls, or one that asks for much and never reads."""
    url = httpx.URL(server.url)
    client = await RawClient.connect(url.host, url.port or 0, 4096)
    if reads:
        client.begin_upload()
        client.send(b"x" * 1000)
    else:
        client.ask(LARGE_REPLY)
    return client


async def usual_time_s(server: Server) -> float:
    """The median time of a plain request, on a connection of its own."""
    times = []
    for _ in range(5):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            started_at = time.monotonic()
            reply = await upload(client)
            times.append(time.monotonic() - started_at)
            assert reply.status_code == 200
    return statistics.median(times)


async def upload(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post(
        "/v1/audio/transcriptions", files={"file": RECORDING}, data={"model": "whisper-1"}
    )


class Holdings:
    def __init__(self, process: psutil.Process) -> None:
        self.num_fds, self.num_threads = process.num_fds(), process.num_threads()
        self.uss_bytes = process.memory_full_info().uss


async def settled(process: psutil.Process) -> Holdings:
    """What the process holds once two looks in a row see the same: connections close a little later."""
    earlier = Holdings(process)
    while True:
        await asyncio.sleep(3)
        now = Holdings(process)
        if now.num_fds == earlier.num_fds and now.uss_bytes >= earlier.uss_bytes - MIB:
            return now
        earlier = now


def left_in(folder: Path, process: psutil.Process) -> tuple[list[str], list[str]]:
    """The files there, and those that have no name any more and are still open."""
    links = []
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{process.pid}/fd/{number}"))
        except FileNotFoundError:  # the handle of a connection that closed meanwhile
            continue
    return sorted(os.listdir(folder)), sorted(link for link in links if link.startswith(str(folder)))
