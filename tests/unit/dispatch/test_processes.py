"""What only replicas in processes of their own have: titles, signals, a parent that may be killed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.executors import MultiprocessExecutor, ProcessReplica
from asr_server.replica import NICENESS
from tests.support.dispatchers import IN_MODULE, OPTIONS, chunk, heard, running, until_ready
from tests.support.embedded import embedded
from tests.support.speech import say


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Dispatcher]:
    async with running("multiprocess", replicas=2) as dispatcher:
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
async def test_replicas_give_way_to_other_processes_with_all_their_threads(pair: Dispatcher) -> None:
    threads = [thread.id for index in range(2) for thread in replica_process(pair, index).threads()]
    niceness = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert niceness == {min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)}
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}


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


async def test_replicas_go_away_when_their_parent_is_killed_while_starting(
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


DESCRIPTORS_OF_A_CLIENT = 10  # at least


async def test_no_key_is_in_a_replicas_arguments_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    replica = await MultiprocessExecutor(embedded(api_key="s3cret")).launch(0)
    process = psutil.Process(replica.pid)
    shown = process.cmdline() + list(process.environ().values())
    await replica.close()
    assert not [text for text in shown if "s3cret" in text]
    assert not [text for text in shown if '"device"' in text]


@pytest.mark.parametrize("num_rounds", range(4))
async def test_a_replica_that_is_closed_just_as_it_ends_keeps_no_descriptor(num_rounds: int) -> None:
    replica = await MultiprocessExecutor(embedded()).launch(0)
    process = psutil.Process()
    before = process.num_fds()
    replica._process.kill()
    while replica._process.returncode is None:
        await asyncio.sleep(0)
    for _ in range(num_rounds):  # of the loop; in one of them it has ended and nobody was told
        await asyncio.sleep(0)
    await replica.close()
    assert process.num_fds() < before - DESCRIPTORS_OF_A_CLIENT


async def test_a_process_that_cannot_be_started_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process()
    executor = MultiprocessExecutor(embedded())
    before = process.num_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        await executor.launch(0)
    assert process.num_fds() == before
