"""Attacks, bursts, kills, freezes and missing folders in turns, beside 32 clients that must not notice."""

import asyncio
import contextlib
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import numpy as np
import psutil
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from asr_server.config import EMBEDDED_MODEL
from asr_server.machine import lower_priority
from benchmarks.health import HealthProbe, probing_health
from benchmarks.reporting import quantile
from tests.conftest import run_server
from tests.support.speech import VOICES, say
from tests.unit.api.attackers import NAMES, attack_from_elsewhere
from tests.unit.api.bare_health import bare_uvicorn
from tests.unit.api.disturbances import DECODER, DISTURBANCES, Patient, kill_a_replica
from tests.unit.api.sample_files import m4a, mp3, sound_file

DURATION_S = float(os.environ.get("DISTURBANCES_S", "3600"))
SEED = 55
KEY = "s3cret"
NUM_CLIENTS = 32
NUM_PLACES = 64
ATTACK_S = 5.0
BURST = NUM_PLACES - NUM_CLIENTS + 8
QUIET_S = 60
MOST_TIMES, MOST_MORE_MS = 1.5, 5.0  # /health, against a bare uvicorn
DESCRIPTORS_OF_A_DECODER = 2
FILE_FORMATS = (sound_file, m4a, mp3)

Step = Callable[[Patient, AsyncOpenAI], Awaitable[object]]


def file_number(number: int) -> bytes:
    digits = "".join(map(str, np.random.default_rng(number).integers(0, 10, 4 + number % 5)))
    return FILE_FORMATS[number % len(FILE_FORMATS)](say(digits, VOICES[number % len(VOICES)], 0.2).samples)


FILES = [file_number(number) for number in range(NUM_CLIENTS)]


async def text_of(client: AsyncOpenAI, number: int) -> str:
    """Return the text of a recording; every fourth client asks for a stream."""
    file = ("recording", FILES[number % NUM_CLIENTS])
    if number % 4:
        return (await client.audio.transcriptions.create(file=file, model="whisper-1")).text
    stream = await client.audio.transcriptions.create(file=file, model="whisper-1", stream=True)
    done = [event.text async for event in stream if event.type == "transcript.text.done"]
    return done[0]


class Clients:
    """32 clients that ask again and again, and check each answer."""

    def __init__(self, client: AsyncOpenAI, texts: list[str]) -> None:
        self.num_answers = 0
        self._client = client
        self._texts = texts
        self._is_over = asyncio.Event()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._keep_asking(number))
            yield
            self._is_over.set()

    async def _keep_asking(self, number: int) -> None:
        while not self._is_over.is_set():
            assert await text_of(self._client, number) == self._texts[number]
            self.num_answers += 1


async def burst(patient: Patient, client: AsyncOpenAI) -> None:
    """Send 8 more than there are places."""
    await asyncio.gather(*(text_of(client, number) for number in range(BURST)))


def steps() -> list[tuple[str, Step]]:
    attacks = [
        (name, lambda patient, _, name=name: attack_from_elsewhere(name, patient.server.url, ATTACK_S))
        for name in NAMES
    ]
    disturbances = [(each.__name__, lambda patient, _, each=each: each(patient)) for each in DISTURBANCES]
    return [*attacks, ("burst", burst), *disturbances]


Spans = dict[str, list[tuple[float, float]]]  # of each step, by `time.perf_counter()`


async def disturb(patient: Patient, client: AsyncOpenAI, until_s: float) -> Spans:
    """Run all steps in ever new orders; return when each was run."""
    spans: Spans = {name: [] for name, _ in steps()}
    while time.monotonic() < until_s:
        for name, step in patient.rng.sample(steps(), len(spans)):
            print(f"{until_s - time.monotonic():5.0f} s left: {name}", flush=True)
            started_at = time.perf_counter()
            await step(patient, client)
            await patient.recovered()
            await patient.pause((0.5, 3.0))
            spans[name].append((started_at, time.perf_counter()))
            if time.monotonic() >= until_s:
                break
    return spans


@contextlib.contextmanager
def patient(folder: Path) -> Iterator[Patient]:
    weights, temporary = folder / "weights", folder / "temporary"
    shutil.copytree(EMBEDDED_MODEL, weights)
    temporary.mkdir()
    options = ("--model", str(weights), "--dtype", "float32", "--replicas", "2", "--api-key", KEY)
    limits = ("--max-concurrent-requests", str(NUM_PLACES), "--drain-s", "120", "--log-level", "warning")
    with run_server(*options, *limits, TMPDIR=str(temporary)) as server:
        yield Patient(server, 2, weights, temporary, random.Random(SEED))
    assert server.process.returncode == 0


def holdings(patient: Patient) -> dict[str, int]:
    """Return what the server holds, without connections and decode processes, which are kept."""
    process = psutil.Process(patient.server.process.pid)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    num_decoders = len(patient.processes(DECODER))
    num_connections = len(process.net_connections("tcp"))
    return {
        "descriptors": process.num_fds() - num_connections - DESCRIPTORS_OF_A_DECODER * num_decoders,
        "processes": len(process.children(recursive=True)) - num_decoders,
        "files": len(list(patient.temporary.rglob("*"))),
        "shared memory": maps.count("memfd:"),
    }


def kinds_of_descriptors(patient: Patient) -> dict[str, int]:
    """Return how many there are of each kind: what a leak is made of."""
    kinds: Counter[str] = Counter()
    folder = Path(f"/proc/{patient.server.process.pid}/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            kinds[re.sub(r"\d+", "N", os.readlink(folder / name))] += 1
    return dict(kinds)


async def until_as_before(patient: Patient, before: dict[str, int]) -> dict[str, int]:
    """Wait for connections that close a little later; return what is held now."""
    deadline = time.monotonic() + QUIET_S
    while (now := holdings(patient)) != before and time.monotonic() < deadline:
        await asyncio.sleep(1)
    return now


async def num_in_flight(patient: Patient) -> int:
    load = await asyncio.to_thread(patient.server.get, "/load")
    return int(load.json()["server_load"])


async def drain_loses_nothing(patient: Patient, client: AsyncOpenAI, texts: list[str]) -> None:
    """End the server with requests in flight, and a replica during that."""
    asking = [asyncio.create_task(text_of(client, number)) for number in range(NUM_CLIENTS)]
    async with asyncio.timeout(QUIET_S):
        while await num_in_flight(patient) + sum(each.done() for each in asking) < NUM_CLIENTS:
            await asyncio.sleep(0.01)
    patient.server.process.terminate()
    await kill_a_replica(patient)
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [answer for answer, text in zip(answers, texts, strict=True) if answer != text] == []


def report(name: str, probe: HealthProbe, started_at: float) -> float:
    assert probe.latencies_since(time.perf_counter() - QUIET_S), f"{name} answers no more"
    waits_ms = [1000 * wait_s for wait_s in probe.latencies_since(started_at)]
    figures = [quantile(waits_ms, share) for share in (0.5, 0.99, 1.0)]
    print(f"/health of {name}, p50, p99, max in ms:", *(f"{each:.1f}" for each in figures))
    return figures[1]


def report_steps(spans: Spans, server: HealthProbe, bare: HealthProbe) -> None:
    """Print what each step does to /health."""
    for name, runs in spans.items():
        waits_ms, bare_waits_ms = (
            [1000 * wait_s for run in runs for wait_s in probe.latencies_between(*run)]
            for probe in (server, bare)
        )
        if waits_ms and bare_waits_ms:
            p99_ms, bare_p99_ms = quantile(waits_ms, 0.99), quantile(bare_waits_ms, 0.99)
            print(
                f"{name}: {len(runs)} times, {len(waits_ms)} answers, "
                f"p99 {p99_ms:.1f} and {bare_p99_ms:.1f} ms"
            )


@asynccontextmanager
async def official_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    http_client = DefaultAsyncHttpxClient(limits=httpx2.Limits(max_connections=2 * NUM_PLACES))
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=900, http_client=http_client) as client:
        yield client


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Run this process, which sends, behind the server: clients have machines of their own."""
    lower_priority(10)
    yield
    with contextlib.suppress(PermissionError):  # only root may
        lower_priority(-10)


@pytest.mark.trial
@pytest.mark.timeout(DURATION_S + 1200)
async def test_32_clients_notice_nothing_of_an_hour_of_attacks_kills_and_freezes(tmp_path: Path) -> None:
    with (
        bare_uvicorn() as bare,
        patient(tmp_path) as ill,
        probing_health(ill.server.url) as probe,
        probing_health(bare) as bare_probe,
        giving_way(),
    ):
        async with official_client(ill.server.url) as client:
            texts = [await text_of(client, number) for number in range(NUM_CLIENTS)]
            clients = Clients(client, texts)
            await burst(ill, client)
            await ill.recovered()
            before, kinds_before = holdings(ill), kinds_of_descriptors(ill)
            started_at = time.perf_counter()
            async with clients.asking():
                spans = await disturb(ill, client, time.monotonic() + DURATION_S)
            print(f"{clients.num_answers} answers")
            report_steps(spans, probe, bare_probe)
            p99_ms, bare_p99_ms = (
                report("the server", probe, started_at),
                report("a bare uvicorn", bare_probe, started_at),
            )
            after = await until_as_before(ill, before)
            print(f"held before: {before}, after: {after}")
            print(f"descriptors before: {kinds_before}, after: {kinds_of_descriptors(ill)}")
            await drain_loses_nothing(ill, client, texts)
    assert clients.num_answers >= NUM_CLIENTS
    assert all(after[name] <= before[name] for name in before)
    assert p99_ms <= MOST_TIMES * bare_p99_ms + MOST_MORE_MS
