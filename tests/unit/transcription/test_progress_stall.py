"""A request in which nothing moves ends with an error; one that waits for its turn or its client goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from asr_server.api.errors import response_to
from asr_server.audio.recording import PreprocessPool, Recording
from asr_server.core import DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import RequestStalled
from asr_server.metrics import REGISTRY
from asr_server.transcription.progress import MAX_STEPS_IN_FLIGHT, ChunkProgress, StallLimits
from asr_server.transcription.transcriber import Transcriber
from asr_server.transport.messages import Command, Event, Heartbeat
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise, say, wav
from tests.support.memory_file import MemoryFile
from tests.support.tokens import make_tokenizer, words

if TYPE_CHECKING:
    pass

ENGLISH = DecodingOptions(language="en")
IN_DOUBT = {"de": 0.4, "en": 0.3, "zh": 0.3}


class BusyReplica(FakeReplica):
    """Keeps whatever it is sent, and steps on."""

    beat_s = 0.1

    def send(self, command: Command) -> None:
        self.holding = True
        super().send(command)

    async def receive(self) -> list[Event]:
        return [
            Heartbeat(num_steps=event.num_steps * MAX_STEPS_IN_FLIGHT)
            if isinstance(event, Heartbeat)
            else event
            for event in await super().receive()
        ]


@asynccontextmanager
async def transcriber(
    replica: FakeReplica, limits: StallLimits, workers: int = 1
) -> AsyncIterator[Transcriber]:
    dispatcher, pool = Dispatcher(embedded(), replica), PreprocessPool(workers)
    await dispatcher.start()
    try:
        yield Transcriber(dispatcher, pool, make_tokenizer(), stall_limits=limits)
    finally:
        await dispatcher.stop()
        await asyncio.to_thread(pool.shutdown)


async def read(app: Transcriber, options: DecodingOptions = ENGLISH) -> str:
    async with app.run(Recording(MemoryFile(wav(noise(75)))), options) as transcription:
        return "".join([delta.text async for delta in transcription])


def num_stalled() -> float:
    return REGISTRY.get_sample_value("asr_requests_stalled_total") or 0.0


async def test_tasks_that_wait_for_each_other_end_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a stream in a doubtful language did: its first chunk waited for the votes of chunks that waited
    for its text.
    """
    monkeypatch.setattr(ChunkProgress, "on_wait_for_others", lambda self: None)
    replica = FakeReplica(lambda submit: say(*words("1")))
    replica.probabilities = IN_DOUBT
    before = num_stalled()
    async with transcriber(replica, StallLimits(request_s=0.2)) as app, asyncio.timeout(60):
        with pytest.raises(RequestStalled, match="nothing of it has moved"):
            await read(app, DecodingOptions(early_results=True, streams=True))
    assert num_stalled() == before + 1
    assert "the request is ended: nothing of it has moved" in caplog.text


@pytest.mark.slow
async def test_a_chunk_that_its_replica_never_finishes_ends_the_request() -> None:
    async with transcriber(BusyReplica(lambda submit: say()), StallLimits()) as app, asyncio.timeout(60):
        with pytest.raises(RequestStalled, match="steps without finishing"):
            await read(app)


async def test_a_pool_that_finishes_nothing_ends_the_request() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    release = threading.Event()
    async with transcriber(replica, StallLimits(request_s=0.1, pool_s=0.2)) as app, asyncio.timeout(60):
        stuck = asyncio.create_task(app.pool.run(release.wait))
        try:
            with pytest.raises(RequestStalled, match="threads that decode"):
                await read(app)
        finally:
            release.set()
            await stuck


@pytest.mark.slow
async def test_a_request_that_waits_for_its_turn_is_not_ended() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    replica.holding = True
    async with transcriber(replica, StallLimits(request_s=0.5)) as app, asyncio.timeout(60):
        running = asyncio.create_task(read(app))
        await asyncio.wait([running], timeout=2.0)
        assert not running.done()
        replica.holding = False
        for submit in replica.held:
            replica.release(submit)
        assert await running


@pytest.mark.slow
async def test_a_client_that_reads_slowly_does_not_end_its_request() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    async with (
        asyncio.timeout(60),
        transcriber(replica, StallLimits(request_s=0.5)) as app,
        app.run(Recording(MemoryFile(wav(noise(75)))), ENGLISH) as transcription,
    ):
        deltas = aiter(transcription)
        first = await anext(deltas)
        await asyncio.sleep(2.0)  # four times the limit
        assert first.text + "".join([delta.text async for delta in deltas])


def test_the_error_says_what_happened_in_openais_body() -> None:
    response = response_to(RequestStalled("It came to a standstill."))
    assert response.status_code == 500
    assert b'"code":"request_stalled"' in response.body
