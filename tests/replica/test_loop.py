"""The loop of a replica, with a real engine in this process."""

from __future__ import annotations

import threading

import pytest

from asr_server.channel.messages import (
    Drain,
    Event,
    InlineEngineClient,
    InlineEngineServer,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)
from asr_server.core import ChunkId, DecodingOptions
from asr_server.replica.loop import serve
from benchmarks.clips import make_clip
from benchmarks.engine_helpers import Checkpoint
from tests.checkpoints import pocket_directory


@pytest.fixture
def pocket() -> Checkpoint:
    return Checkpoint.load(pocket_directory())


class Client(InlineEngineClient):
    """Chooses a language only once the engine drains, as a request's slow choice would."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def deliver(self, event: Event | None) -> None:
        assert event is not None
        self.events.append(event)
        if isinstance(event, LanguageDetected):
            self.send(Drain())
            threading.Timer(0.2, lambda: self.send(SetLanguage(event.id, "de"))).start()


async def test_a_replica_that_drains_still_decodes_a_chunk_that_waits_for_its_language(
    pocket: Checkpoint,
) -> None:
    client = Client()
    id = ChunkId("a", 0)
    client.send(Submit(id, make_clip(0, 1.0), DecodingOptions(max_new_tokens=4)))
    serve(pocket.engine(), InlineEngineServer(client))
    assert [event.id for event in client.events if isinstance(event, Result)] == [id]
