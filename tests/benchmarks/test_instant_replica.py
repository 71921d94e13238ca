from __future__ import annotations

import numpy as np

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import ChunkId, Credit, DecodingOptions, EarlyResult, Result, Submit
from asr_server.tokenizer import Tokenizer
from benchmarks.instant_replica import NUM_SEGMENTS, TOKENS_PER_SEGMENT, InstantEngine


def test_a_chunk_gets_its_segments_at_once_and_a_credit_back() -> None:
    tokenizer = Tokenizer.from_directory(EMBEDDED_MODEL)
    engine = InstantEngine(tokenizer)
    samples = np.zeros(5 * 16_000, np.float32)
    engine.handle(Submit(ChunkId("request", 0), samples, DecodingOptions(early_results=True)))
    assert engine.has_work
    credit, *early, result = engine.step()
    assert credit == Credit(1)
    assert [type(each) for each in early] == [EarlyResult] * (NUM_SEGMENTS - 1)
    assert isinstance(result, Result)
    assert len(result.result.tokens) == NUM_SEGMENTS * TOKENS_PER_SEGMENT
    assert result.result.tokens[-1] == tokenizer.specials.timestamp_begin + 5 * 50
    assert not engine.has_work
