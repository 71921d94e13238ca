from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from asr_server.channel.messages import (
    Credit,
    Drain,
    EarlyResult,
    InlineEngineClient,
    InlineEngineServer,
    Result,
    Submit,
)
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import ChunkId, DecodingOptions
from asr_server.replica.loop import serve
from benchmarks.instant_replica import NUM_SEGMENTS, NUM_SLOTS, TOKENS_PER_SEGMENT, InstantEngine

if TYPE_CHECKING:
    from asr_server.engine import Engine


async def test_a_chunk_gets_its_segments_at_once_and_a_credit_back() -> None:
    tokenizer, client = Tokenizer.from_directory(EMBEDDED_MODEL), InlineEngineClient()
    options = DecodingOptions(early_results=True)
    client.send(Submit(ChunkId("request", 0), np.zeros(5 * 16_000, np.float32), options))
    client.send(Drain())
    serve(cast("Engine", InstantEngine(tokenizer)), InlineEngineServer(client))
    first, credit = await client.receive(), await client.receive()
    assert isinstance(first, Credit)
    assert first.num_slots == NUM_SLOTS
    assert credit == Credit(1)
    for _ in range(NUM_SEGMENTS - 1):
        assert isinstance(await client.receive(), EarlyResult)
    result = await client.receive()
    assert isinstance(result, Result)
    assert len(result.result.tokens) == NUM_SEGMENTS * TOKENS_PER_SEGMENT
    assert result.result.tokens[-1] == tokenizer.specials.timestamp_begin + 5 * 50
