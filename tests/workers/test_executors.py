"""The same tests for every way of running replicas, with the real engine on the embedded model."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest

from asr_server.config import EMBEDDED_MODEL, Settings
from asr_server.core import Chunk, ChunkResult, DecodingOptions
from asr_server.tokenizer import Tokenizer
from asr_server.workers.dispatcher import Dispatcher
from asr_server.workers.multiprocess import MultiprocessExecutor, ProcessReplica
from tests.speech import Spoken, digits_of, say

OPTIONS = DecodingOptions(language="en")


@pytest.fixture(params=["inline", "multiprocess"])
async def dispatcher(request: pytest.FixtureRequest) -> AsyncIterator[Dispatcher]:
    async with running(request.param) as dispatcher:
        yield dispatcher


class running:  # noqa: N801 (reads as a phrase: `async with running("inline")`)
    def __init__(self, executor: Literal["inline", "multiprocess"], replicas: int = 1) -> None:
        self._dispatcher = Dispatcher(Settings(executor=executor, replicas=replicas, dtype="float32"))

    async def __aenter__(self) -> Dispatcher:
        await self._dispatcher.start()
        await until_ready(self._dispatcher)
        return self._dispatcher

    async def __aexit__(self, *_: object) -> None:
        await self._dispatcher.stop()


async def until_ready(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(60):
        while not (dispatcher.replica_states and all(state.ready for state in dispatcher.replica_states)):
            await asyncio.sleep(0.02)


def chunk(spoken: Spoken, index: int = 0) -> Chunk:
    return Chunk(index, 0, spoken.samples)


def heard(result: ChunkResult) -> str:
    return digits_of(Tokenizer.from_directory(EMBEDDED_MODEL).decode(result.tokens))


def replica_process(dispatcher: Dispatcher, index: int = 0) -> psutil.Process:
    replica = dispatcher.replica_states[index].replica
    assert isinstance(replica, ProcessReplica)
    return psutil.Process(replica.pid)


async def test_chunks_of_several_requests_come_back_right(dispatcher: Dispatcher) -> None:
    said = [say(digits) for digits in ("407", "12", "98653")]
    results = await asyncio.gather(
        *(dispatcher.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
    )
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    assert dispatcher.num_chunks == 0


async def test_a_cancelled_request_leaves_nothing_and_the_next_is_served(dispatcher: Dispatcher) -> None:
    handle = dispatcher.open("leaves")
    task = asyncio.create_task(handle.submit(chunk(say("123456789")), OPTIONS))
    await asyncio.sleep(0)
    handle.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard(await dispatcher.open("stays").submit(chunk(say("55")), OPTIONS)) == "55"
    assert not dispatcher.replica_states[0].in_flight


async def test_a_bad_chunk_harms_nobody_else(dispatcher: Dispatcher) -> None:
    bad = DecodingOptions(language="xx")
    good = dispatcher.open("good").submit(chunk(say("31")), OPTIONS)
    outcomes = await asyncio.gather(
        dispatcher.open("bad").submit(chunk(say("31")), bad), good, return_exceptions=True
    )
    assert isinstance(outcomes[0], Exception)
    assert isinstance(outcomes[1], ChunkResult)
    assert heard(outcomes[1]) == "31"


async def test_a_replica_process_carries_its_number_in_its_title() -> None:
    async with running("multiprocess") as dispatcher:
        assert replica_process(dispatcher).cmdline()[0].startswith("asr-server replica 0")


async def test_no_key_is_in_the_arguments_or_the_environment_of_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    replica = await MultiprocessExecutor(Settings(api_key="s3cret")).launch(0)
    process = psutil.Process(replica.pid)
    shown = process.cmdline() + list(process.environ().values())
    await replica.close()
    assert not [text for text in shown if "s3cret" in text]
    assert not [text for text in shown if '"device"' in text]


async def test_a_replica_leaves_stopping_to_the_server() -> None:
    async with running("multiprocess") as dispatcher:
        process = replica_process(dispatcher)
        task = asyncio.create_task(dispatcher.open("a").submit(chunk(say("1618")), OPTIONS))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert heard(await task) == "1618"
        assert replica_process(dispatcher).pid == process.pid


async def test_work_of_a_killed_replica_is_done_by_its_successor() -> None:
    async with running("multiprocess") as dispatcher:
        process = replica_process(dispatcher)
        process.suspend()  # so that the chunk is certainly under way when it dies
        task = asyncio.create_task(dispatcher.open("a").submit(chunk(say("2718")), OPTIONS))
        await asyncio.sleep(0)
        assert dispatcher.replica_states[0].in_flight
        process.kill()
        assert heard(await asyncio.wait_for(task, 60)) == "2718"
        assert replica_process(dispatcher).pid != process.pid


async def test_two_replicas_share_the_work_and_one_carries_on_alone() -> None:
    async with running("multiprocess", replicas=2) as dispatcher:
        said = [say(digits) for digits in ("17", "28", "39", "40")]
        replica_process(dispatcher, 1).kill()
        results = await asyncio.gather(
            *(dispatcher.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
        )
        assert [heard(result) for result in results] == [spoken.digits for spoken in said]


async def test_stopping_ends_every_process() -> None:
    async with running("multiprocess", replicas=2) as dispatcher:
        processes = [replica_process(dispatcher, index) for index in range(2)]
    assert not any(process.is_running() for process in processes)


async def test_replicas_go_away_when_their_parent_is_killed_and_the_next_start_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = (sys.executable, "-m", "asr_server", "serve", "--port", "0")
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert (await server.stdout.readline()).startswith(b"listening on")
    children = psutil.Process(server.pid).children(recursive=True)
    assert children
    server.kill()
    await server.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 20)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive
    assert list(tmp_path.glob("asr-*"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    MultiprocessExecutor(Settings())
    assert not list(tmp_path.glob("asr-*"))


async def test_a_checkpoint_that_is_none_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    dispatcher = Dispatcher(Settings(model=str(tmp_path)))
    await dispatcher.start()
    async with asyncio.timeout(100):
        while not dispatcher.given_up:
            await asyncio.sleep(0.05)
    assert not dispatcher.ready
    await dispatcher.stop()
