"""The same tests for every way of running replicas, with the real engine on the embedded model."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from tests.support.dispatchers import IN_MODULE, OPTIONS, chunk, heard, named_replicas, running, until_ready
from tests.support.speech import say
from tests.support.until import LIMIT_S, until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_replica() -> AsyncIterator[Dispatcher]:
    async with running("inline") as dispatcher:
        yield dispatcher


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_replicas() -> AsyncIterator[Dispatcher]:
    async with running("multiprocess", 2) as dispatcher:
        yield dispatcher


@pytest.fixture(params=["one_replica", "two_replicas"], scope="module")
def dispatcher(request: pytest.FixtureRequest) -> Dispatcher:
    """One replica in a thread, two in processes; tests/cluster has two on hosts."""
    started: Dispatcher = request.getfixturevalue(request.param)
    return started


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
async def test_replicas_that_are_killed_lose_nothing_and_are_replaced(two_replicas: Dispatcher) -> None:
    await until_ready(two_replicas)
    killed = [process for process in named_replicas() if process.suspend() is None]  # with work on each
    said = [say(digits) for digits in ("17", "28", "39", "40")]
    submits = (two_replicas.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
    answers = asyncio.gather(*submits)
    await asyncio.sleep(0)
    assert all(state.in_flight for state in two_replicas.supervisor.replica_states)
    for process in killed:
        process.kill()
    results = await asyncio.wait_for(answers, LIMIT_S)
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    await until_ready(two_replicas)
    assert len(named_replicas()) == len(killed) == 2
    assert not set(named_replicas()) & set(killed)


@pytest.mark.trial
@IN_MODULE
async def test_a_frozen_replica_is_noticed_and_replaced(two_replicas: Dispatcher) -> None:
    await until_ready(two_replicas)
    frozen = named_replicas()[0]
    frozen.suspend()
    frozen_at = time.monotonic()
    said = [say(digits) for digits in ("17", "28", "39", "40")]
    tasks = [
        asyncio.create_task(two_replicas.open(each.digits).submit(chunk(each), OPTIONS)) for each in said
    ]
    while "frozen" not in two_replicas.supervisor.last_failure:
        await asyncio.sleep(0.01)
    detected_s = time.monotonic() - frozen_at
    print(f"noticed after {detected_s:.1f} s")
    assert detected_s < 5.0, "a trial, on a machine that does nothing else"
    results = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    await until_ready(two_replicas)
    assert frozen not in named_replicas()
