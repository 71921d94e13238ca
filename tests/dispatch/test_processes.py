"""What only replicas in processes of their own have: titles, signals, a parent that may be killed."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from asr_server.config import Settings
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.processes import MultiprocessExecutor, ProcessReplica
from tests.dispatch.test_executors import IN_MODULE, OPTIONS, chunk, heard, running, until_ready
from tests.embedded import embedded
from tests.speech import say

NICENESS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Dispatcher]:
    """Two replicas with cores of their own, where there are as many."""
    pin_cores = "on" if len(os.sched_getaffinity(0)) > 1 else "off"
    settings: dict[str, Any] = {"replica_niceness": NICENESS, "pin_cores": pin_cores}
    async with running("multiprocess", replicas=2, **settings) as dispatcher:
        yield dispatcher


def replica_process(dispatcher: Dispatcher, index: int = 0) -> psutil.Process:
    replica = dispatcher.supervisor.replica_states[index].replica
    assert isinstance(replica, ProcessReplica)
    return psutil.Process(replica.pid)


@IN_MODULE
async def test_a_replica_process_carries_its_number_in_its_title(pair: Dispatcher) -> None:
    titles = sorted(replica_process(pair, index).cmdline()[0] for index in range(2))
    assert [title[: len("asr-server replica 0")] for title in titles] == [
        "asr-server replica 0",
        "asr-server replica 1",
    ]


@IN_MODULE
async def test_a_replica_leaves_stopping_to_the_server(pair: Dispatcher) -> None:
    processes = [replica_process(pair, index) for index in range(2)]
    task = asyncio.create_task(pair.open("a").submit(chunk(say("1618")), OPTIONS))
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    assert heard(await task) == "1618"
    assert [replica_process(pair, index).pid for index in range(2)] == [process.pid for process in processes]


@IN_MODULE
async def test_pinned_replicas_run_on_cores_of_their_own_and_give_way_to_others_with_all_threads(
    pair: Dispatcher,
) -> None:
    mask = os.sched_getaffinity(0)
    if len(mask) < 2:
        pytest.skip("needs two cores")
    said = [say(digits) for digits in ("17", "28")]
    results = await asyncio.gather(
        *(pair.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
    )
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    threads = [[thread.id for thread in replica_process(pair, index).threads()] for index in range(2)]
    cores = [{frozenset(os.sched_getaffinity(thread)) for thread in each} for each in threads]
    niceness = {os.getpriority(os.PRIO_PROCESS, thread) for each in threads for thread in each}
    assert niceness == {min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)}
    schedulers = {os.sched_getscheduler(thread) for each in threads for thread in each}
    assert schedulers == {os.SCHED_BATCH}
    assert [len(each) for each in cores] == [1, 1], "all threads of a replica share its cores"
    (first,), (second,) = cores
    assert len(first) == len(second) == len(mask) // 2
    assert not first & second
    assert first | second <= mask


@IN_MODULE
async def test_one_of_two_replicas_carries_on_alone_and_stopping_ends_every_process(pair: Dispatcher) -> None:
    processes = [replica_process(pair, index) for index in range(2)]
    said = [say(digits) for digits in ("17", "28", "39", "40")]
    processes[1].kill()
    results = await asyncio.gather(
        *(pair.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
    )
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    await until_ready(pair)
    processes += [replica_process(pair, index) for index in range(2)]
    await pair.stop()
    assert not any(process.is_running() for process in processes)


async def test_replicas_go_away_when_their_parent_is_killed_while_starting_and_the_next_start_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_killed_server.py` has what is left of a server that was ready."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = (sys.executable, "-m", "asr_server", "serve", "--port", "0")
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    while not list(tmp_path.glob("asr-*")):
        await asyncio.sleep(0.01)
    replicas = psutil.Process(server.pid).children()
    server.kill()
    await server.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, replicas, 20)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive
    assert list(tmp_path.glob("asr-*"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    MultiprocessExecutor(embedded())
    assert not list(tmp_path.glob("asr-*"))


@pytest.mark.trial
async def test_a_checkpoint_that_is_none_is_given_up(tmp_path: Path) -> None:
    """`tests/server/test_run.py` gives up a replica that cannot import torch, which is sooner."""
    (tmp_path / "config.json").write_text("{}")
    dispatcher = Dispatcher(Settings(model=str(tmp_path)))
    await dispatcher.start()
    async with asyncio.timeout(100):
        while not dispatcher.supervisor.given_up:
            await asyncio.sleep(0.05)
    assert not dispatcher.ready
    await dispatcher.stop()
