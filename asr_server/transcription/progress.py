"""Hold the final text of a chunk under way, which a stream never takes back, and the prompt of its next part.

Closed segments that a replica reports (`EarlyResult`) stay: if the rest fails, the part ends with them.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult, DecodingOptions, TranscriptDelta
from asr_server.transcription.segments import DecodedPart

# Half of Whisper's text positions, less <|startofprev|>: the rule of openai-whisper.
MAX_PROMPT_TOKENS: Final = 223
NOTHING_SENT: Final = TranscriptDelta("", (), (), None, 0, 0, 0.0)


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

    async def is_finished(self) -> bool:
        """Wait for more; return whether all is read. For one waiter only."""
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
            token_peaks_s=result.token_peaks_s[:num_text],
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
