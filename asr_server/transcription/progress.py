"""Hold the final text of a chunk under way and the prompt of its next part; end a request that stands still.

Closed segments that a replica reports (`EarlyResult`) stay: a result that would take them back is dropped,
and the part ends with them.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from asr_server import metrics
from asr_server.audio.recording import PreprocessPool
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult, DecodingOptions, TranscriptDelta
from asr_server.dispatch.queue import RequestHandle
from asr_server.errors import RequestStalled
from asr_server.transcription.segments import DecodedPart

# Half of Whisper's text positions, less <|startofprev|>: the rule of openai-whisper.
MAX_PROMPT_TOKENS: Final = 223
NOTHING_SENT: Final = TranscriptDelta("", (), (), None, 0, 0, 0.0)

logger = logging.getLogger(__name__)


class ChunkProgress:
    """A chunk under way: its finished parts, and the final segments of the next."""

    def __init__(self) -> None:
        self.parts: list[DecodedPart] = []
        self._finished = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_begun = asyncio.Event()

    def report(self, parts: list[DecodedPart]) -> None:
        self.parts = parts
        self._changed.set()
        self._has_begun.set()

    def finish(self, parts: list[DecodedPart]) -> None:
        self._finished.set()
        self.report(parts)

    def num_spans(self, part: int) -> int:
        return len(self.parts[part].spans) if part < len(self.parts) else 0

    def on_wait_for_others(self) -> None:
        """End `first_text`: this chunk waits for others, so they must not wait for it."""
        self._has_begun.set()

    async def first_text(self) -> None:
        """Wait for the first report, the end, or until others go first."""
        await self._has_begun.wait()

    async def wait_for_more(self) -> bool:
        """Return whether all is read. For one waiter only."""
        await self._changed.wait()
        self._changed.clear()
        return self._finished.is_set()

    async def result(self) -> list[DecodedPart]:
        await self._finished.wait()
        return self.parts


class EarlyResults:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.last: ChunkResult | None = None
        self._tokenizer = tokenizer

    def add(self, result: ChunkResult) -> bool:
        """Take a report; return False if it does not continue the last, as from another replica."""
        if not self._is_beginning_of(result):
            return False
        self.last = result
        return True

    def keep(self, result: ChunkResult, options: DecodingOptions) -> ChunkResult:
        """Return the result, or the last report if the result would retract it."""
        if self.last is None or not self._is_beginning_of(result):
            return self.last or result
        return self._with_times_of(result, self.last) if result.is_silence(options) else result

    def _with_times_of(self, result: ChunkResult, last: ChunkResult) -> ChunkResult:
        num_text = sum(map(self._tokenizer.is_text, last.tokens))
        return msgspec.structs.replace(
            last,
            token_times_s=result.token_times_s[: num_text + 1],
            token_onsets_s=result.token_onsets_s[:num_text],
            token_focus=result.token_focus[:num_text],
            pauses_s=result.pauses_s,
            is_full=result.is_full,
        )

    def _is_beginning_of(self, result: ChunkResult) -> bool:
        last = self.last
        return last is None or result.tokens[: len(last.tokens)] == last.tokens


def not_yet_sent(sent: TranscriptDelta, whole: TranscriptDelta) -> TranscriptDelta:
    assert whole.text.startswith(sent.text), "a delta is final when it is sent"
    return msgspec.structs.replace(
        whole,
        text=whole.text[len(sent.text) :],
        logprobs=whole.logprobs[len(sent.logprobs) :],
        num_audio_tokens=whole.num_audio_tokens - sent.num_audio_tokens,
        num_text_tokens=whole.num_text_tokens - sent.num_text_tokens,
    )


# -- The prompt of the next part -----------------------------------------------------------------------------
#
# The request's, then the text so far: the chunk's, or all chunks' on request. The rules are openai-whisper's
# (`transcribe.py`, `condition_on_previous_text`).

UNRELIABLE_TEMPERATURE: Final = 0.5  # above it a text is no prompt for the next


class PreviousText:
    def __init__(self, prompt_tokens: tuple[int, ...]) -> None:
        self.tokens = prompt_tokens  # to decode the next part with

    def add(self, part: DecodedPart) -> None:
        """Add the part's text and timestamps; silence adds nothing."""
        if part.result.temperature > UNRELIABLE_TEMPERATURE and part.num_read:
            self.tokens = ()
            return
        heard = tuple(token for span in part.spans for token in span.tokens)
        self.tokens = (*self.tokens, *heard)[-MAX_PROMPT_TOKENS:]


# -- A request that stands still -----------------------------------------------------------------------------
#
# Other waits are bounded elsewhere. What remains are faults of the server, such as a lost thread.

# Of the engine, while a chunk is with its replica. Six tries of 448 tokens are 2,688 steps in a slot, and as
# many may pass before there is a free one.
MAX_STEPS_IN_FLIGHT = 20_000
TICK_S = 1.0


@dataclass(frozen=True)
class StallLimits:
    request_s: float = 60.0
    pool_s: float = 660.0  # the work that one file may be (`AudioLimits`), and a minute


class StallWatch:
    """Watch one request by ticks of the event loop, so that a paused process is not a stall."""

    def __init__(self, handle: RequestHandle, pool: PreprocessPool, limits: StallLimits) -> None:
        self._handle, self._pool, self._limits = handle, pool, limits
        self._num_in_pool = 0
        self._seen: tuple[int, ...] = ()  # what had moved at the last tick
        self._still_s = 0.0  # since something moved

    @contextmanager
    def waiting_for_pool(self) -> Iterator[None]:
        self._num_in_pool += 1
        try:
            yield
        finally:
            self._num_in_pool -= 1

    async def run(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Watch until cancelled. Behind the last of `tasks`, only the client waits. Raises RequestStalled."""
        tick_s = min(TICK_S, self._limits.request_s / 4)
        while True:
            await asyncio.sleep(tick_s)
            if not all(task.done() for task in tasks) and (reason := self._stall(tick_s)):
                metrics.requests_stalled.inc()
                logger.error("the request is ended: %s", reason)
                raise RequestStalled(f"The request came to a standstill and was ended: {reason}.")

    def _stall(self, tick_s: float) -> str:
        handle, num_finished = self._handle, self._pool.stats.finished if self._num_in_pool else 0
        seen = (handle.num_moves, num_finished, self._num_in_pool)
        if seen != self._seen or handle.num_waiting:
            self._seen, self._still_s = seen, 0.0
            return ""
        self._still_s += tick_s
        if handle.num_in_flight:
            if (num_steps := handle.steps_in_flight()) > MAX_STEPS_IN_FLIGHT:
                return f"a replica has taken {num_steps} steps without finishing its chunk"
        elif self._num_in_pool:
            if self._still_s >= self._limits.pool_s:
                return f"the threads that decode have finished nothing for {self._still_s:.0f} s"
        elif self._still_s >= self._limits.request_s:
            return f"nothing of it has moved for {self._still_s:.0f} s"
        return ""
