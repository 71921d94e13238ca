"""Faults in real replicas, in their launches and in the API process itself, and what is left of them."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asr_server.core import Chunk
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.executors import MultiprocessExecutor, ProcessReplica
from asr_server.dispatch.supervisor import ReplicaGone, ReplicaLimits
from tests.support.commands import output_of
from tests.support.dispatchers import OPTIONS, chunk, heard, until_ready
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.support.until import until
from tests.unit.dispatch.faulty_replica import FaultyExecutor, marked

SETTINGS = embedded(dtype="float32")
PATIENT = ReplicaLimits(pause_s=0.1)
IMPATIENT = ReplicaLimits(hung_after_s=3.0, hung_at_most_s=3.0)


async def test_a_step_that_is_slow_layer_by_layer_ends_no_replica() -> None:
    dispatcher = Dispatcher(SETTINGS, FaultyExecutor, limits=PATIENT)
    await dispatcher.start()
    await until_ready(dispatcher)
    (before,) = dispatcher.supervisor.replica_states
    before.limits = IMPATIENT
    slow = Chunk(0, 0, marked(say("2718").samples))
    assert heard(await dispatcher.open("a").submit(slow, OPTIONS)) == "2718"
    assert dispatcher.supervisor.replica_states == [before]
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
    assert "Too many open files" in output_of(sys.executable, "-c", script)


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
