"""Replicas that are killed while clients wait: nobody notices but by the clock."""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from asr_server.api.models import ENGINE_LOST
from asr_server.config import EMBEDDED_MODEL
from tests.cluster.ray_cluster import ray_cluster
from tests.conftest import Server, run_server
from tests.support.speech import VOICES, say
from tests.support.until import until, wait_until
from tests.unit.api.sample_files import sound_file

MODEL = {"model": "whisper-1"}
PATH = "/v1/audio/transcriptions"
NUM_KILLS = 10  # of each kind
NUM_CLIENTS = 32


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
    upload = {"file": file_number(1, 10)}
    deltas: list[str] = []
    await until(lambda: len(ready_replicas(two_replicas)) == 2)
    replicas = ready_replicas(two_replicas)
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
    await until(lambda: two_replicas.written().count("was killed, probably because memory ran out") == 2)
    assert done == "".join(deltas) == undisturbed


KINDS = {
    "two processes": ("--replicas", "2"),
    "one process": ("--replicas", "1"),
    "two ranks": ("--device", "cpu", "--tensor-parallel-size", "2"),
    "two actors": ("--executor", "ray", "--replicas", "2"),  # each with a raylet of its own
}


@pytest.fixture(params=KINDS)
def disturbed(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Made in the main thread, which Ray insists on."""
    options = KINDS[request.param]
    with contextlib.ExitStack() as stack:
        if "ray" in options:
            options += ("--ray-address", stack.enter_context(ray_cluster()).address)
        yield stack.enter_context(run_server("--dtype", "float32", *options))


@pytest.mark.trial
@pytest.mark.timeout(3000)
async def test_ten_kills_and_ten_stops_under_32_requests_change_no_text(disturbed: Server) -> None:
    files = [file_number(number, 1 + number % 3) for number in range(NUM_CLIENTS)]
    killed = asyncio.Event()
    num_answers = 0

    async def keep_asking(client: httpx.AsyncClient, number: int, undisturbed: str) -> None:
        nonlocal num_answers
        while not killed.is_set():
            ask = ask_for_a_stream if number % 4 == 0 else ask_for_text
            assert await ask(client, files[number]) == undisturbed
            num_answers += 1

    limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=disturbed.url, timeout=900, limits=limits) as client:
        undisturbed = [await ask_for_text(client, file) for file in files]
        async with asyncio.TaskGroup() as group:
            for number, text in enumerate(undisturbed):
                group.create_task(keep_asking(client, number, text))
            detected_s = await asyncio.to_thread(kill_at_random, disturbed, random.Random(8))
            killed.set()
    print(f"{num_answers} answers meanwhile; stops noticed after at most {max(detected_s):.1f} s")
    assert num_answers >= NUM_CLIENTS


async def ask_for_text(client: httpx.AsyncClient, file: bytes) -> str:
    reply = await client.post(PATH, files={"file": file}, data=MODEL)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["text"])


async def ask_for_a_stream(client: httpx.AsyncClient, file: bytes) -> str:
    deltas, done = "", None
    data = MODEL | {"stream": "true"}
    async with client.stream("POST", PATH, files={"file": file}, data=data) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            deltas += event.get("delta", "")
            done = event.get("text", done)
    assert done == deltas
    return deltas


def kill_at_random(server: Server, rng: random.Random) -> list[float]:
    """How long it took until the server had noticed of each stop that the replica is frozen."""
    detected_s: list[float] = []
    begun = time.monotonic()
    signals = [signal.SIGKILL, signal.SIGSTOP] * NUM_KILLS
    rng.shuffle(signals)
    for number in signals:
        time.sleep(rng.uniform(0.5, 5.0))
        while not (processes := processes_of_ready_replicas(server)):
            time.sleep(rng.uniform(0.5, 5.0))
        before, started = num_frozen(server), time.monotonic()
        if number == signal.SIGSTOP:  # another rank that stands still counts as hung, which takes longer
            processes = [each for each in processes if " rank " not in title_of(each)]
        rng.choice(processes).send_signal(number)
        while number == signal.SIGSTOP and num_frozen(server) == before:
            assert time.monotonic() - started < 30
            time.sleep(0.02)
        if number == signal.SIGSTOP:
            detected_s.append(time.monotonic() - started)
        print(f"{number.name}, {time.monotonic() - begun:.0f} s after the first request", flush=True)
    return detected_s


def processes_of_ready_replicas(server: Server) -> list[psutil.Process]:
    """With their other ranks, and as actors of the test's own Ray cluster."""
    replicas = server.get("/load").json()["replicas"]
    names = [f"asr-server {replica['name']}" for replica in replicas if replica["ready"]]
    mine = psutil.Process(server.process.pid).children(recursive=True)
    actors = [each for each in psutil.Process().children(recursive=True) if "ray::" in title_of(each)]
    return [each for each in mine + actors if any(name in title_of(each) for name in names)]


def num_frozen(server: Server) -> int:
    return server.written().count("has been silent for")


@pytest.mark.slow
def test_without_its_weights_the_server_lives_on_and_says_why_it_is_not_ready(tmp_path: Path) -> None:
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(EMBEDDED_MODEL, model)
    with run_server("--model", str(model)) as server:
        model.rename(away)
        (replica,) = ready_replicas(server)
        replica.kill()
        wait_until(lambda: str(model) in server.written().partition("was killed")[2])
        assert server.get("/health").status_code == 200
        reply = server.get("/ready")
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == ENGINE_LOST
        away.rename(model)
        wait_until(lambda: server.get("/ready").status_code == 200)
