"""Replicas of two ranks (tensor parallelism): the same tokens as with one, and no rank outlives another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.executors import ProcessReplica
from tests.cluster.ray_cluster import ray_cluster
from tests.conftest import run_server
from tests.support.checkpoints import large_directory, narrow_large_directory
from tests.support.dispatchers import chunk, until_ready
from tests.support.embedded import embedded
from tests.support.speech import digits_of, say
from tests.support.until import until
from tests.unit.api.sample_files import sound_file

SAID = [say(digits) for digits in ("407", "12", "98653", "5550", "1234567", "8", "31415", "926")]
PLAIN = DecodingOptions(language="en")
WORDS = DecodingOptions(language="en", word_timestamps=True)
LADDER = DecodingOptions(language="en", temperatures=(0.0, 0.4, 0.8), logprob_threshold=0.0)
SEARCHED = DecodingOptions(language="en", compression_ratio_threshold=0.0)  # by a beam
# One language: the embedded model has no other. With several, the replica asks which one it is.
PENALISED = DecodingOptions(language="en", repetition_penalty=1.3)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(embedded(dtype="float32", device="cpu", max_slots=4, **settings))
    await dispatcher.start()
    try:
        await until_ready(dispatcher)
        yield dispatcher
    finally:
        await dispatcher.stop()


async def decode(dispatcher: Dispatcher, options: list[DecodingOptions]) -> list[ChunkResult]:
    """More chunks than there are slots, some of them cancelled under way."""
    leaving = [dispatcher.open(f"leaves {number}") for number in range(3)]
    left = [asyncio.create_task(each.submit(chunk(SAID[4]), PLAIN)) for each in leaving]
    staying = [
        asyncio.create_task(
            dispatcher.open(spoken.digits).submit(chunk(spoken, index), options[index % len(options)])
        )
        for index, spoken in enumerate(SAID)
    ]
    await staying[0]
    for each in leaving:
        each.cancel()
    results = await asyncio.gather(*staying)
    await asyncio.gather(*left, return_exceptions=True)
    return results


def assert_alike(several: list[ChunkResult], one: list[ChunkResult]) -> None:
    """Tokens are the same; figures are, but for the order in which the ranks' parts are added."""
    for mine, reference in zip(several, one, strict=True):
        assert mine.tokens == reference.tokens
        assert (mine.language, mine.temperature) == (reference.language, reference.temperature)
        assert mine.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
        assert mine.no_speech_prob == pytest.approx(reference.no_speech_prob, abs=1e-3)
        assert mine.token_times_s == pytest.approx(reference.token_times_s, abs=0.03)


def ranks_of(dispatcher: Dispatcher) -> list[psutil.Process]:
    """Rank 0, which is the replica's process, and its children."""
    replica = dispatcher.supervisor.replica_states[0].replica
    assert isinstance(replica, ProcessReplica)
    process = psutil.Process(replica.pid)
    return [process, *process.children()]


async def until_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    for process in alive:
        process.kill()
    assert not alive


async def test_two_ranks_hear_what_one_hears_with_cancels_words_penalties_beams_and_the_ladder() -> None:
    options = [PLAIN, WORDS, LADDER, PENALISED, SEARCHED]
    async with running(executor="inline") as one:
        expected = await decode(one, options)
    async with running(tensor_parallel_size=2) as two:
        ranks = ranks_of(two)
        assert [process.cmdline()[0] for process in ranks[1:]] == ["asr-server replica 0 rank 1"]
        assert_alike(await decode(two, options), expected)
        assert not [connection for process in ranks for connection in process.net_connections("inet")]
    assert any(result.num_fallbacks for result in expected)
    await until_gone(ranks)


@pytest.mark.trial
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("directory", [narrow_large_directory, large_directory])
async def test_two_ranks_of_large_v3s_layout_hear_what_one_hears(directory: Callable[[], Path]) -> None:
    """And find its languages, and draw its tokens, among thousands that random weights make alike."""
    model = str(directory())
    options = [
        DecodingOptions(max_new_tokens=10),
        DecodingOptions(language="de", word_timestamps=True, max_new_tokens=10),
        DecodingOptions(
            language="en", prompt_tokens=(400, 500, 600), temperatures=(3.0,), top_p=0.9, max_new_tokens=10
        ),
        DecodingOptions(temperatures=(0.0, 1.0, 2.0), compression_ratio_threshold=0.0, max_new_tokens=10),
    ]
    async with running(executor="inline", model=model) as one:
        expected = await decode(one, options)
    async with running(tensor_parallel_size=2, model=model) as two:
        assert_alike(await decode(two, options), expected)
    assert {result.num_fallbacks for result in expected} == {0, 2}


@pytest.mark.trial
async def test_two_ranks_in_an_actor_of_ray_hear_what_one_hears_and_end_with_it() -> None:
    options = [PLAIN, LADDER]
    async with running(executor="inline") as one:
        expected = await decode(one, options)
    with ray_cluster(cpus_for_each=2) as cluster:
        on_ray: dict[str, Any] = {"executor": "ray", "replicas": 1, "ray_address": cluster.address}
        before = psutil.Process().children(recursive=True)  # of a server that other tests share, too
        async with running(tensor_parallel_size=2, **on_ray) as two:
            assert_alike(await decode(two, options), expected)
            started = psutil.Process().children(recursive=True)
            ranks = [each for each in started if each not in before and is_replica(each)]
            assert len(ranks) == 2
            ranks[0].kill()
            await until_gone(ranks)
            assert_alike(await decode(two, options), expected)


def is_replica(process: psutil.Process) -> bool:
    return "asr-server replica 0" in " ".join(process.cmdline())


async def test_a_request_survives_rank_1_and_no_rank_survives_the_server() -> None:
    """Through HTTP, with rank 1 killed under way, and then the server."""
    with run_server("--dtype", "float32", "--tensor-parallel-size", "2", "--device", "cpu") as server:
        before = ranks_of_server(server.process.pid)
        upload = {"file": sound_file(say("3141592", lead_s=0.3).samples)}
        async with httpx.AsyncClient(base_url=server.url, timeout=150) as client:
            request = asyncio.create_task(
                client.post("/v1/audio/transcriptions", data={"model": "whisper-1"}, files=upload)
            )
            await asyncio.sleep(0.1)
            before[1].kill()
            response = await request
        assert response.status_code == 200
        assert len(digits_of(response.json()["text"])) >= 6
        await until_gone(before)
        await until(lambda: len(ranks_of_server(server.process.pid)) == 2)
        after = ranks_of_server(server.process.pid)
        assert "replica 0 rank 1 (pid" in server.written()
        server.process.kill()
        await until_gone(after)


def ranks_of_server(pid: int) -> list[psutil.Process]:
    named = {
        " ".join(process.cmdline()).strip(): process
        for process in psutil.Process(pid).children(recursive=True)
    }
    return [
        process
        for title, process in sorted(named.items())
        if title in ("asr-server replica 0", "asr-server replica 0 rank 1")
    ]
