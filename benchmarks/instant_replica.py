"""A server whose engine answers at once: what is left is the API process. Used by `serving --instant`.

    python -m benchmarks.instant_replica serve MODEL    as `asr-server serve`; MODEL's weights are not read
    python -m benchmarks.instant_replica                a replica, which that server starts

A chunk of any length gets five segments of random text, a hundred tokens in all.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from asr_server import cli
from asr_server.channel.messages import (
    ChunkTimes,
    Command,
    Credit,
    Drain,
    EarlyResult,
    Event,
    Heartbeat,
    Result,
    Submit,
)
from asr_server.channel.zeromq import ReplicaSpec, ZmqEngineServer
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE, ChunkResult
from asr_server.dispatch.processes import MultiprocessExecutor
from asr_server.process import end_with_the_parent, leave_stopping_to_the_parent
from asr_server.replica.main import run

if TYPE_CHECKING:
    from asr_server.engine import Engine

NUM_SLOTS = 128
ENCODE_BATCH = 8
NUM_SEGMENTS = 5
TOKENS_PER_SEGMENT = 20  # with the timestamps on both sides


class InstantEngine:
    """What `engine_loop` asks of an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_steps = self.slots_in_use = self.num_decoded_tokens = 0
        self.draining = False
        self._first_time = tokenizer.specials.timestamp_begin
        text = [token for token in range(self._first_time) if tokenizer.is_text(token)]
        self._text_tokens = np.array(text)
        self._rng = np.random.default_rng(0)
        self._waiting: deque[Submit] = deque()

    def initial_credit(self) -> Credit:
        return Credit(ENCODE_BATCH, NUM_SLOTS)

    def heartbeat(self) -> Heartbeat:
        tokens = self.num_decoded_tokens
        return Heartbeat(self.num_steps, num_decode_steps=tokens, num_decoded_tokens=tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def handle(self, command: Command) -> None:
        self.draining |= isinstance(command, Drain)
        if isinstance(command, Submit):
            self._waiting.append(command)

    def step(self) -> list[Event]:
        self.num_steps += 1
        events = [event for submit in self._waiting for event in self._answers(submit)]
        self._waiting.clear()
        return events

    def _answers(self, submit: Submit) -> Iterator[Event]:
        yield Credit(1)
        tokens: list[int] = []
        length = len(submit.samples) * POSITIONS_PER_S // SAMPLE_RATE
        for index in range(NUM_SEGMENTS):
            start, end = (length * at // NUM_SEGMENTS for at in (index, index + 1))
            text = self._rng.choice(self._text_tokens, TOKENS_PER_SEGMENT - 2).tolist()
            tokens += [self._first_time + start, *text, self._first_time + end]
            if submit.options.early_results and index:
                yield EarlyResult(submit.id, _result(tokens))
        self.num_decoded_tokens += len(tokens)
        yield Result(submit.id, _result(tokens), ChunkTimes(0.0, 0.0))

    def close(self) -> None:
        pass


def _result(tokens: list[int]) -> ChunkResult:
    return ChunkResult(
        tokens=tuple(tokens),
        logprobs=(-0.25,) * len(tokens),
        avg_logprob=-0.25,
        no_speech_prob=0.01,
        compression_ratio=1.5,
        temperature=0.0,
        language=None,
        finish_reason="stop",
    )


def main() -> None:
    if len(sys.argv) > 1:
        MultiprocessExecutor.module = "benchmarks.instant_replica"
        cli.main()
    else:
        _run_replica()


def _run_replica() -> None:
    leave_stopping_to_the_parent()
    spec = ReplicaSpec.from_parent()
    end_with_the_parent()
    tokenizer = Tokenizer.from_directory(Path(spec.settings.model))
    # It is all that the loop asks of an engine, and no subclass: that would load torch.
    run(ZmqEngineServer(spec.address), lambda: cast("Engine", InstantEngine(tokenizer)))


if __name__ == "__main__":
    main()
