"""An executor whose replica says what the test tells it to: for what happens around an engine.

Whatever can be shown on a real engine is shown there.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable

import numpy as np
import soundfile

from asr_server.core import SAMPLE_RATE, ChunkId, ChunkResult, Samples
from asr_server.dispatch.supervisor import ReplicaGone
from asr_server.transport.messages import (
    Cancel,
    Cancelled,
    Command,
    Credit,
    Event,
    Failed,
    Heartbeat,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)

Say = Callable[[Submit], ChunkResult | Exception]


def say(
    *tokens: int, finish_reason: str = "stop", avg_logprob: float = -0.1, no_speech_prob: float = 0.0
) -> ChunkResult:
    return ChunkResult(
        tokens=tokens,
        logprobs=(avg_logprob,) * len(tokens),
        avg_logprob=avg_logprob,
        no_speech_prob=no_speech_prob,
        compression_ratio=1.0,
        temperature=0.0,
        language=None,
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


class FakeReplica:
    """Executor and replica in one. While `holding`, what has been submitted waits for `release`."""

    name = "replica 0"
    pid: int | None = None
    beat_s = 1.0  # between heartbeats where it says nothing else

    def __init__(self, answer: Say, credit: int = 100) -> None:
        self.submits: list[Submit] = []
        self.cancelled: list[str] = []
        self.languages_set: list[str] = []
        self.probabilities: dict[str, float] | None = None  # reported for chunks without a language
        self.probabilities_of: Callable[[Submit], dict[str, float] | None] = lambda _: self.probabilities
        self.holding = False
        self.before_launch: Callable[[], Awaitable[object]] = _nothing  # may wait or raise
        self._answer = answer
        self._credit = credit
        self._held: dict[ChunkId, Submit] = {}
        self._num_beats = 0
        self._events: asyncio.Queue[Event | ReplicaGone] = asyncio.Queue()

    async def start(self) -> int:
        return 1

    async def stop(self) -> None:
        pass

    async def launch(self, index: int) -> FakeReplica:
        await self.before_launch()
        self._events.put_nowait(Credit(self._credit))
        return self

    def send(self, command: Command) -> None:
        match command:
            case Submit():
                self.submits.append(command)
                self._held[command.id] = command
                probabilities = self.probabilities_of(command)
                if command.options.language is None and probabilities:
                    self._events.put_nowait(LanguageDetected(command.id, probabilities))
                elif not self.holding:
                    self._reply(command.id)
            case SetLanguage():
                self.languages_set.append(command.language)
                if not self.holding:
                    self._reply(command.id)
            case Cancel():
                self.cancelled.append(command.handle_id)
                own = [id for id in self._held if id.handle_id == command.handle_id]
                for id in own if command.id is None else [command.id]:
                    self._held.pop(id, None)
                self._events.put_nowait(Cancelled(command.handle_id, command.id))

    @property
    def held(self) -> list[Submit]:
        return list(self._held.values())

    def release(self, submit: Submit) -> None:
        self._reply(submit.id)

    def stop_holding(self) -> None:
        """Answer what is held, and from now on everything at once."""
        self.holding = False
        for submit in self.held:
            self.release(submit)

    def _reply(self, id: ChunkId) -> None:
        said = self._answer(self._held.pop(id))
        self._events.put_nowait(Failed(id, str(said)) if isinstance(said, Exception) else Result(id, said))
        self._events.put_nowait(Credit(1))

    def die(self) -> None:
        """What it holds is sent again to its successor, which is the same object."""
        self._held.clear()
        self._events.put_nowait(ReplicaGone("killed by a test"))

    async def receive(self) -> list[Event]:
        try:
            async with asyncio.timeout(self.beat_s):
                event = await self._events.get()
        except TimeoutError:
            self._num_beats += 1
            return [Heartbeat(num_steps=self._num_beats)]
        if isinstance(event, ReplicaGone):
            raise event
        return [event]

    async def close(self, drain_s: float = 0.0) -> None:
        pass


async def _nothing() -> None:
    pass


def noise(duration_s: float) -> Samples:
    """Loud enough to count as sound everywhere."""
    rng = np.random.default_rng(0)
    return (0.1 * rng.standard_normal(round(duration_s * SAMPLE_RATE))).astype(np.float32)


def wav(samples: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()
