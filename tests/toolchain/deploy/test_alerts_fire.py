"""Every alert fires in a real Prometheus by its fault on a real server. Minutes of the rules are seconds."""

import asyncio
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml

from asr_server.config import EMBEDDED_MODEL
from tests.conftest import Server, run_server
from tests.support.speech import say
from tests.toolchain.deploy.test_monitoring import ALERTS, RULES
from tests.toolchain.deploy.tools import path_of
from tests.unit.api.disturbances import DECODER, Patient, away, freeze_a_replica, send
from tests.unit.api.sample_files import m4a, sound_file

pytestmark = pytest.mark.trial

LIMIT_S = 120.0
SHORT = sound_file(say("3").samples)
OPTIONS = ("--max-slots", "1", "--max-concurrent-requests", "64")
IMPATIENT = "tests.toolchain.deploy.impatient_server"
# A minute becomes four seconds in a range and one in `for`, so that a fault of seconds is seen.
RANGE_S, FOR_S = 4, 1
MOST_QUEUE_WAIT_S = 0.5  # for 30 s


def long_file() -> bytes:
    """Return what FFmpeg decodes for longer than a fault takes."""
    return m4a(np.tile(say("314").samples, 400))


def quick_rules() -> str:
    text = re.sub(r"\[(\d+)m\]", lambda match: f"[{int(match[1]) * RANGE_S}s]", ALERTS.read_text())
    text = re.sub(r"for: (\d+)m", lambda match: f"for: {int(match[1]) * FOR_S}s", text)
    assert text.count("> 30\n") == 1
    return text.replace("> 30\n", f"> {MOST_QUEUE_WAIT_S}\n")


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def firing(self) -> set[str]:
        alerts = httpx.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def scrapes(self) -> bool:
        """Return whether it has found the server up."""
        try:
            found = httpx.get(f"{self.url}/api/v1/query", params={"query": "up == 1"}).json()
        except httpx.TransportError:
            return False
        return bool(found["data"]["result"])

    async def until_firing(self, *names: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while missing := set(names) - await asyncio.to_thread(self.firing):
                await asyncio.sleep(0.3)
                assert missing <= set(RULES)


@contextmanager
def prometheus(folder: Path, server: Server) -> Iterator[Prometheus]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "alerts.yaml").write_text(quick_rules())
    target = {"job_name": "asr-server", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [target],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [path_of("prometheus"), f"--config.file={folder}/prometheus.yaml"]
    options = [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen([*command, *options])
    try:
        started = Prometheus(f"http://{address}")
        deadline = time.monotonic() + LIMIT_S
        while not started.scrapes():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield started
    finally:
        process.terminate()
        process.wait(30)


async def post(client: httpx.AsyncClient, file: bytes) -> int:
    data = {"model": "whisper-1", "language": "en"}
    return (await client.post("/v1/audio/transcriptions", files={"file": file}, data=data)).status_code


@asynccontextmanager
async def asked_by(num_clients: int, server: Server, file: bytes) -> AsyncIterator[None]:
    """Send the file again and again for the block."""

    async def ask(client: httpx.AsyncClient) -> None:
        while True:
            await post(client, file)

    limits = httpx.Limits(max_connections=num_clients)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        asking = [group.create_task(ask(client)) for _ in range(num_clients)]
        yield
        for task in asking:
            task.cancel()


async def until_fired(
    found: Prometheus, names: tuple[str, ...], fault: Callable[[], Awaitable[None]]
) -> None:
    """Make the fault again and again until its alerts fire."""
    waiting = asyncio.create_task(found.until_firing(*names))
    while not waiting.done():
        await fault()
        await asyncio.sleep(0.2)
    await waiting
    print(f"\nfired: {', '.join(names)}", flush=True)


async def test_every_alert_fires_by_its_fault(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    with (
        run_server(*OPTIONS, module=IMPATIENT, TMPDIR=str(temporary)) as server,
        prometheus(tmp_path, server) as found,
    ):
        patient = Patient(server, 1, EMBEDDED_MODEL, temporary, random.Random(1))
        await asyncio.sleep(3)  # some evaluations of a server without a fault
        assert found.firing() == set()

        async def nothing() -> None: ...

        async def kill_the_replicas() -> None:
            for replica in patient.replicas():
                send(replica, signal.SIGKILL)

        async def kill_the_decoders() -> None:
            for decoder in patient.processes(DECODER)[1:]:
                send(decoder, signal.SIGKILL)

        frozen = set[psutil.Process]()

        async def freeze_the_decoders() -> None:
            for decoder in patient.processes(DECODER)[1:]:
                frozen.add(decoder)
                send(decoder, signal.SIGSTOP)

        async def freeze_the_replica() -> None:
            await patient.recovered()
            await freeze_a_replica(patient)

        names = ("AsrRequestsRejected", "AsrQueueGrows", "AsrQueueWait", "AsrSlowerThanSpeech")
        long = long_file()
        async with asked_by(96, server, SHORT):
            await until_fired(found, names, nothing)
        async with asked_by(4, server, long):
            await until_fired(found, ("AsrDecodeProcessDeaths",), kill_the_decoders)
        async with asked_by(4, server, long):
            await until_fired(found, ("AsrRequestsStalled",), freeze_the_decoders)
        for decoder in frozen:  # a stopped process would not notice that its server has ended
            send(decoder, signal.SIGCONT)
        await until_fired(found, ("AsrReplicaStuck",), freeze_the_replica)
        await until_fired(found, ("AsrReplicaRestarts", "AsrServerNotReady"), kill_the_replicas)
        await patient.recovered()
        async with asked_by(1, server, SHORT):
            with away(temporary):  # as a full disk: uploads cannot be stored
                await until_fired(found, ("AsrServerErrors",), nothing)
        server.process.terminate()
        await until_fired(found, ("AsrServerDown",), nothing)
