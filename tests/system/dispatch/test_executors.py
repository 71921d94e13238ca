"""The same tests for every way of running replicas, with the real engine on the embedded model."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, Literal

import psutil
import pytest
import pytest_asyncio

from asr_server.annexes.ray.executor import RayExecutor
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import Chunk, ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from tests.support.embedded import embedded
from tests.support.speech import Spoken, digits_of, say
from tests.support.until import LIMIT_S, until
from tests.unit.dispatch.ray_cluster import RayCluster, ray_cluster

OPTIONS = DecodingOptions(language="en")


IN_MODULE = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest_asyncio.fixture(params=["inline", "multiprocess", "ray"], scope="module", loop_scope="module")
async def dispatcher(request: pytest.FixtureRequest) -> AsyncIterator[Dispatcher]:
    """One replica in a thread, two processes, two actors on a host (a raylet) each."""
    address = request.getfixturevalue("cluster").address if request.param == "ray" else "auto"
    async with running(request.param, 1 + (request.param != "inline"), address) as dispatcher:
        yield dispatcher


class running:  # noqa: N801 (reads as a phrase: `async with running("inline")`)
    def __init__(
        self,
        executor: Literal["inline", "multiprocess", "ray"],
        replicas: int = 1,
        ray_address: str = "auto",
        **settings: Any,
    ) -> None:
        common: dict[str, Any] = {"executor": executor, "replicas": replicas, "dtype": "float32"}
        chosen = embedded(ray_address=ray_address, **common, **settings)
        self._dispatcher = Dispatcher(chosen, RayExecutor(chosen) if executor == "ray" else None)

    async def __aenter__(self) -> Dispatcher:
        await self._dispatcher.start()
        await until_ready(self._dispatcher)
        return self._dispatcher

    async def __aexit__(self, *_: object) -> None:
        await self._dispatcher.stop()


async def until_ready(dispatcher: Dispatcher) -> None:
    """Until every replica takes chunks: credits that earlier ones were sent for may still be on their way."""
    async with asyncio.timeout(250):
        while (
            sum(state.ready and state.credit > 0 for state in dispatcher.supervisor.replica_states)
            < dispatcher.supervisor.num_replicas
        ):
            assert not dispatcher.supervisor.given_up, dispatcher.supervisor.last_failure
            await asyncio.sleep(0.02)


def chunk(spoken: Spoken, index: int = 0) -> Chunk:
    return Chunk(index, 0, spoken.samples)


def heard(result: ChunkResult) -> str:
    return digits_of(Tokenizer.from_directory(EMBEDDED_MODEL).decode(result.tokens))


@IN_MODULE
async def test_chunks_of_several_requests_come_back_right(dispatcher: Dispatcher) -> None:
    said = [say(digits) for digits in ("407", "12", "98653")]
    results = await asyncio.gather(
        *(dispatcher.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
    )
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    assert dispatcher.num_chunks == 0


@IN_MODULE
async def test_a_cancelled_request_leaves_nothing_and_the_next_is_served(dispatcher: Dispatcher) -> None:
    handle = dispatcher.open("leaves")
    task = asyncio.create_task(handle.submit(chunk(say("123456789")), OPTIONS))
    await asyncio.sleep(0)
    handle.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard(await dispatcher.open("stays").submit(chunk(say("55")), OPTIONS)) == "55"
    await until(lambda: not any(state.in_flight for state in dispatcher.supervisor.replica_states))


@IN_MODULE
async def test_a_bad_chunk_harms_nobody_else(dispatcher: Dispatcher) -> None:
    bad = DecodingOptions(language="xx")
    good = dispatcher.open("good").submit(chunk(say("31")), OPTIONS)
    outcomes = await asyncio.gather(
        dispatcher.open("bad").submit(chunk(say("31")), bad), good, return_exceptions=True
    )
    assert isinstance(outcomes[0], Exception)
    assert isinstance(outcomes[1], ChunkResult)
    assert heard(outcomes[1]) == "31"


@IN_MODULE
@pytest.mark.parametrize("dispatcher", ["multiprocess", "ray"], indirect=True)
async def test_replicas_that_are_killed_lose_nothing_and_are_replaced(dispatcher: Dispatcher) -> None:
    await until_ready(dispatcher)
    killed = [process for process in named_replicas() if process.suspend() is None]  # with work on each
    said = [say(digits) for digits in ("17", "28", "39", "40")]
    tasks = [
        asyncio.create_task(dispatcher.open(spoken.digits).submit(chunk(spoken), OPTIONS)) for spoken in said
    ]
    await asyncio.sleep(0)
    assert all(state.in_flight for state in dispatcher.supervisor.replica_states)
    for process in killed:
        process.kill()
    results = await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    await until_ready(dispatcher)
    assert len(named_replicas()) == len(killed) == 2
    assert not set(named_replicas()) & set(killed)


@pytest.mark.trial
@IN_MODULE
@pytest.mark.parametrize("dispatcher", ["multiprocess", "ray"], indirect=True)
async def test_a_frozen_replica_is_noticed_and_replaced(dispatcher: Dispatcher) -> None:
    await until_ready(dispatcher)
    frozen = named_replicas()[0]
    frozen.suspend()
    frozen_at = time.monotonic()
    said = [say(digits) for digits in ("17", "28", "39", "40")]
    tasks = [asyncio.create_task(dispatcher.open(each.digits).submit(chunk(each), OPTIONS)) for each in said]
    while "frozen" not in dispatcher.supervisor.last_failure:
        await asyncio.sleep(0.01)
    detected_s = time.monotonic() - frozen_at
    print(f"noticed after {detected_s:.1f} s")
    assert detected_s < 5.0, "a trial, on a machine that does nothing else"
    results = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    await until_ready(dispatcher)
    assert frozen not in named_replicas()


@IN_MODULE
@pytest.mark.parametrize("dispatcher", ["ray"], indirect=True)
async def test_a_host_that_is_lost_takes_no_request_with_it(
    dispatcher: Dispatcher, cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await until_ready(dispatcher)
    said = [say(digits) for digits in ("17", "28", "39", "40", "506", "71")]
    tasks = [
        asyncio.create_task(dispatcher.open(spoken.digits).submit(chunk(spoken), OPTIONS)) for spoken in said
    ]
    await asyncio.sleep(0)
    assert all(state.in_flight for state in dispatcher.supervisor.replica_states)
    await asyncio.to_thread(cluster.kill_other_host)
    results = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    assert "replica " in dispatcher.supervisor.last_failure
    assert dispatcher.ready


@pytest.mark.trial
@IN_MODULE
@pytest.mark.parametrize("dispatcher", ["ray"], indirect=True)
async def test_after_a_host_is_lost_the_replica_of_another_host_starts_anew(
    dispatcher: Dispatcher, cluster: RayCluster
) -> None:
    """Which takes half a minute of Ray; in the suite replicas start anew while both hosts are there."""
    await asyncio.to_thread(cluster.kill_other_host)
    await until_noticed_by_ray()
    await until(lambda: sum(state.ready for state in dispatcher.supervisor.replica_states) == 1)
    (before,) = [state for state in dispatcher.supervisor.replica_states if state.ready]
    (process,) = named_replicas()
    process.kill()
    states = dispatcher.supervisor.replica_states
    await until(lambda: any(state.ready for state in states if state is not before))
    assert heard(await dispatcher.open("a").submit(chunk(say("314")), OPTIONS)) == "314"


async def until_noticed_by_ray() -> None:
    import ray

    async with asyncio.timeout(60):
        while sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes)) > 1:
            await asyncio.sleep(0.1)


def named_replicas() -> list[psutil.Process]:
    """The processes that carry a replica's number in their title: our children, and those of our raylets."""
    children = psutil.Process().children(recursive=True)
    raylets = [child.pid for child in children if child.name() == "raylet"]
    return [
        child
        for child in children
        if child.ppid() in (os.getpid(), *raylets) and "asr-server replica " in title_of(child)
    ]


def title_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, IndexError):
        return str(process.cmdline()[0])
    return ""
