"""Replicas that are killed while clients wait: nobody notices but by the clock."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator

import httpx
import numpy as np
import psutil
import pytest

from tests.api.sample_files import sound_file
from tests.conftest import Server, run_server
from tests.speech import VOICES, say

MODEL = {"model": "whisper-1"}
PATH = "/v1/audio/transcriptions"
NUM_KILLS = 10


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[Server]:
    with run_server("--dtype", "float32", "--replicas", "2") as server:
        yield server


def ready_replicas(server: Server) -> list[psutil.Process]:
    """The processes of the replicas that take work."""
    replicas = server.get("/load").json()["replicas"]
    titles = tuple(f"asr-server {replica['name']}" for replica in replicas if replica["ready"])
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if title_of(child).startswith(titles)]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just been killed
        return ""


def file_number(number: int, num_sequences: int = 1) -> bytes:
    rng = np.random.default_rng(number)
    parts = [
        say("".join(map(str, rng.integers(0, 10, 6))), VOICES[number % len(VOICES)], 0.2).samples
        for _ in range(num_sequences)
    ]
    return sound_file(np.concatenate(parts))


async def test_a_stream_goes_on_when_its_replica_is_killed(two_replicas: Server) -> None:
    upload = {"file": file_number(1, 25)}
    deltas: list[str] = []
    async with asyncio.timeout(100):
        while len(replicas := ready_replicas(two_replicas)) < 2:
            await asyncio.sleep(0.05)
    async with httpx.AsyncClient(base_url=two_replicas.url, timeout=100) as client:
        undisturbed = (await client.post(PATH, files=upload, data=MODEL)).json()["text"]
        async with client.stream("POST", PATH, files=upload, data=MODEL | {"stream": "true"}) as reply:
            async for line in reply.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("type") == "transcript.text.done":
                    done = event["text"]
                if event.get("type") != "transcript.text.delta":
                    continue
                if not deltas:
                    for replica in replicas:
                        replica.kill()
                deltas.append(event["delta"])
    async with asyncio.timeout(30):
        while two_replicas.written().count("exited with status -9") < 2:
            await asyncio.sleep(0.05)
    assert len(deltas) > 5
    assert done == "".join(deltas) == undisturbed


@pytest.mark.trial
@pytest.mark.timeout(900)
async def test_ten_random_kills_under_32_requests_change_no_text(two_replicas: Server) -> None:
    files = [file_number(number, 1 + number % 3) for number in range(32)]
    killed = asyncio.Event()
    num_answers = 0

    async def ask(client: httpx.AsyncClient, file: bytes) -> str:
        reply = await client.post(PATH, files={"file": file}, data=MODEL)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["text"])

    async def keep_asking(client: httpx.AsyncClient, file: bytes, undisturbed: str) -> None:
        nonlocal num_answers
        while not killed.is_set():
            assert await ask(client, file) == undisturbed
            num_answers += 1

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=two_replicas.url, timeout=200, limits=limits) as client:
        undisturbed = [await ask(client, file) for file in files]
        async with asyncio.TaskGroup() as group:
            for file, text in zip(files, undisturbed, strict=True):
                group.create_task(keep_asking(client, file, text))
            await asyncio.to_thread(kill_at_random, two_replicas, random.Random(8))
            killed.set()
    print(f"{num_answers} answers during {NUM_KILLS} kills")
    assert num_answers >= 32


def kill_at_random(server: Server, rng: random.Random) -> None:
    """A kill is -9 or STOP to one replica, or TERM to all of them as a group."""
    for _ in range(NUM_KILLS):
        time.sleep(rng.uniform(0.5, 5.0))
        while not (replicas := ready_replicas(server)):
            time.sleep(rng.uniform(0.5, 5.0))
        how = rng.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))
        for replica in replicas if how == signal.SIGTERM else [rng.choice(replicas)]:
            replica.send_signal(how)
