"""Faults in real replicas, in their launches and in the API process itself, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from asr_server.core import Chunk, ChunkResult
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.processes import MultiprocessExecutor, ProcessReplica
from asr_server.dispatch.supervisor import ReplicaGone, ReplicaLimits
from asr_server.errors import ReplicasEnded
from tests.support.dispatchers import IN_MODULE, OPTIONS, chunk, heard, until_ready
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.support.until import until
from tests.unit.dispatch.faulty_replica import DIES, HANGS, IS_SLOW, FaultyExecutor, marked
from tests.unit.dispatch.scripted import WITHOUT_PAUSE

SETTINGS = embedded(dtype="float32")
PATIENT = ReplicaLimits(pause_s=0.1)
IMPATIENT = ReplicaLimits(hung_after_s=3.0, hung_at_most_s=3.0)


async def until_given_up(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(60):
        while not dispatcher.supervisor.given_up:
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faulty() -> AsyncIterator[Dispatcher]:
    """One replica that obeys marks. Each attempt at a chunk that ends it takes the start of another."""
    dispatcher = Dispatcher(SETTINGS, FaultyExecutor(SETTINGS), limits=PATIENT)
    await dispatcher.start()
    yield dispatcher
    await dispatcher.stop()


def marked_chunk(digits: str, mark: float) -> Chunk:
    return Chunk(0, 0, marked(say(digits).samples, mark))


@IN_MODULE
async def test_a_step_that_is_slow_layer_by_layer_ends_no_replica(faulty: Dispatcher) -> None:
    await until_ready(faulty)
    (before,) = faulty.supervisor.replica_states
    before.limits = IMPATIENT
    assert heard(await faulty.open("a").submit(marked_chunk("2718", IS_SLOW), OPTIONS)) == "2718"
    before.limits = PATIENT
    assert faulty.supervisor.replica_states == [before]


@IN_MODULE
async def test_a_poisonous_chunk_takes_no_neighbour_with_it(faulty: Dispatcher) -> None:
    await until_ready(faulty)
    said = [say(digits) for digits in ("407", "12", "98653", "5", "60", "31")]
    chunks = [chunk(spoken) for spoken in said]
    chunks.insert(2, marked_chunk("31", DIES))
    outcomes = await asyncio.gather(
        *(faulty.open(str(index)).submit(each, OPTIONS) for index, each in enumerate(chunks)),
        return_exceptions=True,
    )
    poison = outcomes.pop(2)
    assert isinstance(poison, ReplicasEnded)
    assert "ended 4 engine processes" in str(poison)
    texts = [heard(result) for result in outcomes if isinstance(result, ChunkResult)]
    assert texts == [spoken.digits for spoken in said]


@IN_MODULE
async def test_a_layer_that_never_ends_ends_the_replica(faulty: Dispatcher) -> None:
    await until_ready(faulty)
    faulty.supervisor.replica_states[0].limits = IMPATIENT
    task = asyncio.create_task(faulty.open("a").submit(marked_chunk("2718", HANGS), OPTIONS))
    async with asyncio.timeout(60):
        while "hung" not in faulty.supervisor.last_failure:
            await asyncio.sleep(0.02)
    task.cancel()


async def test_a_start_that_stalls_is_ended_and_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "stall"
    marker.touch()
    dispatcher = Dispatcher(SETTINGS, FaultyExecutor(SETTINGS, stall=str(marker)))
    await dispatcher.start()
    async with asyncio.timeout(120):
        while marker.exists():
            await asyncio.sleep(0.02)
        (stalling,) = dispatcher.supervisor.replica_states
        stalling.limits = ReplicaLimits(startup_s=0.0)
        while not dispatcher.supervisor.last_failure:
            await asyncio.sleep(0.02)
    assert "was not ready" in dispatcher.supervisor.last_failure
    await until_ready(dispatcher)
    await dispatcher.stop()


async def test_a_replica_comes_back_when_the_folder_for_sockets_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_replica_death.py` takes its weights away."""
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    dispatcher = Dispatcher(SETTINGS, limits=PATIENT)
    await dispatcher.start()
    try:
        await until_ready(dispatcher)
        away = sockets.rename(tmp_path / "away")
        (state,) = dispatcher.supervisor.replica_states
        assert isinstance(state.replica, ProcessReplica)
        os.kill(state.replica.pid, signal.SIGKILL)
        await until(lambda: str(sockets) in dispatcher.supervisor.last_failure)
        away.rename(sockets)
        await until_ready(dispatcher)
        assert heard(await dispatcher.open("a").submit(chunk(say("2718")), OPTIONS)) == "2718"
    finally:
        await dispatcher.stop()


def test_without_file_handles_the_launch_fails_and_the_process_lives() -> None:
    script = """if True:
        import asyncio, os, resource
        from asr_server.dispatch.dispatcher import Dispatcher
        from tests.unit.dispatch.scripted import WITHOUT_PAUSE
        from tests.support.embedded import embedded

        async def main():
            dispatcher = Dispatcher(embedded(), limits=WITHOUT_PAUSE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6,) * 2)
            await dispatcher.start()
            while not dispatcher.supervisor.given_up:
                await asyncio.sleep(0.01)
            print(dispatcher.supervisor.last_failure)

        asyncio.run(main())"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Too many open files" in ended.stdout


class GoneExecutor(MultiprocessExecutor):
    module = "no such module"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])  # they differ in what a closed pipe raises
def test_a_launch_whose_process_is_gone_leaves_nothing_and_says_its_status(
    run: Callable[[Coroutine[Any, Any, None]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    create = asyncio.create_subprocess_exec

    async def create_and_wait(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*command, **options)
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.sleep(0)
        return process

    async def launch() -> int:
        replica = await GoneExecutor(SETTINGS).launch(0)
        with pytest.raises(ReplicaGone, match="exited with status 1"):
            await replica.receive()
        await replica.close()
        return len(os.listdir("/proc/self/fd"))

    async def launch_three_times() -> None:
        assert len({await launch() for _ in range(3)}) == 1, "the number of open files"

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_and_wait)
    run(launch_three_times())
    assert not list(tmp_path.iterdir())


class MuteExecutor(MultiprocessExecutor):
    module = "this"  # a module of Python's that ends by itself


async def test_a_replica_that_ends_before_it_is_ready_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dispatcher = Dispatcher(SETTINGS, MuteExecutor(SETTINGS), limits=WITHOUT_PAUSE)
    await dispatcher.start()
    await until_given_up(dispatcher)
    assert "exited with status 0" in dispatcher.supervisor.last_failure
    assert not list(tmp_path.iterdir())
    await dispatcher.stop()
