"""What holds for every way of running replicas, with two actors on a host (a raylet) each."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from asr_server.dispatch.dispatcher import Dispatcher
from tests.cluster.ray_cluster import RayCluster, ray_cluster
from tests.support.dispatchers import IN_MODULE, OPTIONS, chunk, heard, running, until_ready
from tests.support.speech import say
from tests.support.until import until
from tests.system.dispatch.test_executors import (  # noqa: F401
    test_a_bad_chunk_harms_nobody_else,
    test_a_cancelled_request_leaves_nothing_and_the_next_is_served,
    test_a_frozen_replica_is_noticed_and_replaced,
    test_chunks_of_several_requests_come_back_right,
    test_replicas_that_are_killed_lose_nothing_and_are_replaced,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_replicas(cluster: RayCluster) -> AsyncIterator[Dispatcher]:
    async with running("ray", 2, cluster.address) as dispatcher:
        yield dispatcher


@pytest.fixture(scope="module")
def dispatcher(two_replicas: Dispatcher) -> Dispatcher:
    return two_replicas


@IN_MODULE
async def test_a_host_that_is_lost_takes_no_request_with_it(
    two_replicas: Dispatcher, cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await until_ready(two_replicas)
    said = [say(digits) for digits in ("17", "28", "39", "40", "506", "71")]
    submits = (two_replicas.open(spoken.digits).submit(chunk(spoken), OPTIONS) for spoken in said)
    answers = asyncio.gather(*submits)
    await asyncio.sleep(0)
    assert all(state.in_flight for state in two_replicas.supervisor.replica_states)
    await asyncio.to_thread(cluster.kill_other_host)
    results = await asyncio.wait_for(answers, 120)
    assert [heard(result) for result in results] == [spoken.digits for spoken in said]
    await until(lambda: "replica " in two_replicas.supervisor.last_failure)
    assert two_replicas.ready
