"""What happens to the processes and the folders of a server that runs for long, done to one on purpose."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import Server
from tests.system.api.test_replica_death import title_of

RECOVERED_S = 180
SHORT_S = (7.0, 12.0)
DECODER = "ffmpeg_process"

Disturbance = Callable[["Patient"], Awaitable[None]]


@dataclass
class Patient:
    """A server of several replicas, and where its weights and temporary files are."""

    server: Server
    num_replicas: int
    weights: Path
    temporary: Path
    rng: random.Random

    def processes(self, title: str) -> list[psutil.Process]:
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        return sorted((each for each in children if title in title_of(each)), key=lambda each: each.pid)

    def replicas(self) -> list[psutil.Process]:
        return self.processes("asr-server replica")

    async def pause(self, limits_s: tuple[float, float]) -> None:
        await asyncio.sleep(self.rng.uniform(*limits_s))

    async def recovered(self) -> None:
        """Wait until all replicas take work again."""
        async with asyncio.timeout(RECOVERED_S):
            while not await asyncio.to_thread(self._is_whole):
                await asyncio.sleep(0.2)

    def _is_whole(self) -> bool:
        """Whether as many processes run as are ready: the server sees a moment later that one has ended."""
        num_ready: int = sum(replica["ready"] for replica in self.server.get("/load").json()["replicas"])
        return num_ready == len(self.replicas()) == self.num_replicas


def send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself meanwhile
        process.send_signal(number)


async def until_gone(process: psutil.Process) -> None:
    async with asyncio.timeout(RECOVERED_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.1)


async def kill_a_replica(patient: Patient) -> None:
    send(patient.rng.choice(patient.replicas()), signal.SIGKILL)


async def kill_all_replicas_within_4_s(patient: Patient) -> None:
    for replica in patient.replicas():
        send(replica, signal.SIGKILL)
        await patient.pause((0.5, 3.0))


async def kill_a_replica_while_it_starts(patient: Patient) -> None:
    before = patient.replicas()
    send(patient.rng.choice(before), signal.SIGKILL)
    async with asyncio.timeout(RECOVERED_S):
        while not (started := [each for each in patient.replicas() if each not in before]):
            await asyncio.sleep(0.01)
    await patient.pause((0.0, 0.5))
    send(started[0], signal.SIGKILL)


async def kill_replicas_right_after_they_are_ready(patient: Patient) -> None:
    for _ in range(3):
        await kill_a_replica(patient)
        await patient.recovered()


async def freeze_a_replica(patient: Patient) -> None:
    frozen = patient.rng.choice(patient.replicas())
    send(frozen, signal.SIGSTOP)
    await until_gone(frozen)


async def throttle_a_replica(patient: Patient) -> None:
    """Let it run a third of the time: slow is not hung."""
    slow = patient.rng.choice(patient.replicas())
    end = time.monotonic() + patient.rng.uniform(10, 20)
    while time.monotonic() < end:
        send(slow, signal.SIGSTOP)
        await asyncio.sleep(0.4)
        send(slow, signal.SIGCONT)
        await asyncio.sleep(0.2)
    assert slow in patient.replicas(), "a slow replica was ended"


async def freeze_the_decoders(patient: Patient) -> None:
    """Stop the processes that decode with FFmpeg until the server has given one of them up."""
    async with asyncio.timeout(RECOVERED_S):
        while not (decoders := patient.processes(DECODER)[1:]):  # the first one forks the others
            await asyncio.sleep(0.1)
    try:
        for decoder in decoders:
            send(decoder, signal.SIGSTOP)
        await first_completed(until_gone(decoder) for decoder in decoders)
    finally:
        for decoder in decoders:
            send(decoder, signal.SIGCONT)


async def first_completed(waits: Iterable[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def away(folder: Path) -> Iterator[None]:
    elsewhere = folder.rename(folder.with_name(f"{folder.name}-away"))
    try:
        yield
    finally:
        elsewhere.rename(folder)


async def take_the_weights_away(patient: Patient) -> None:
    with away(patient.weights):
        await kill_a_replica(patient)
        await patient.pause(SHORT_S)


async def take_the_temporary_folder_away(patient: Patient) -> None:
    with away(patient.temporary):
        await kill_a_replica(patient)
        await patient.pause(SHORT_S)


DISTURBANCES: tuple[Disturbance, ...] = (
    kill_a_replica,
    kill_all_replicas_within_4_s,
    kill_a_replica_while_it_starts,
    kill_replicas_right_after_they_are_ready,
    freeze_a_replica,
    throttle_a_replica,
    freeze_the_decoders,
    take_the_weights_away,
    take_the_temporary_folder_away,
)
