"""What the timestamp tokens of a text say: its times, and how much of the audio it has read.

The rule is openai-whisper's (`transcribe.py`): a pair of timestamp tokens side by side closes a segment and
opens the next; a single one at the end says that the rest of the window is read; a segment opened and
not closed was cut off, and decoding goes on from the last closed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.tokenizer.tokenizer import Tokenizer

MIN_TAIL_S: Final = 0.2  # a shorter unread tail holds no word


class Timestamps:
    """Reads timestamp tokens against one stretch of audio of `duration_s`."""

    def __init__(self, tokenizer: Tokenizer, duration_s: float) -> None:
        self._begin = tokenizer.specials.timestamp_begin
        self._precision_s = tokenizer.time_precision_s
        self.duration_s = duration_s

    def time_s(self, token: int) -> float:
        """The time that a timestamp token names, at most the end of the audio."""
        return min((token - self._begin) * self._precision_s, self.duration_s)

    def is_time(self, token: int) -> bool:
        return token >= self._begin

    def borders(self, tokens: Sequence[int]) -> list[int]:
        """The indices between two timestamps side by side."""
        return [
            at for at in range(1, len(tokens)) if self.is_time(tokens[at - 1]) and self.is_time(tokens[at])
        ]

    def tail(self, result: ChunkResult, options: DecodingOptions) -> tuple[int, float | None]:
        """How many tokens are read, and from where decoding has to go on; None: all is read.

        There is no tail in the last part allowed, nor behind a limit that the client set itself.
        """
        if options.is_last_part or not options.timestamps or options.max_new_tokens is not None:
            return len(result.tokens), None
        closed = self._last_closed(result)
        tail_s = self.time_s(result.tokens[closed]) if closed is not None else 0.0
        if closed is None or not 0.0 < tail_s <= self.duration_s - MIN_TAIL_S:
            return len(result.tokens), None  # nowhere to go on from, or nothing there
        return closed + 1, tail_s

    def _last_closed(self, result: ChunkResult) -> int | None:
        """The index of the timestamp behind which the audio is unread."""
        tokens, borders = result.tokens, self.borders(result.tokens)
        last = len(tokens) - 1
        if last > 0 and self.is_time(tokens[last]) and last not in borders:
            return last if result.finish_reason == "length" else None
        return borders[-1] - 1 if borders else None
