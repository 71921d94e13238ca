"""The text so far as the prompt of what follows, where a request asks for it. Used by `chunk_reader.py`.

The rules are openai-whisper's (`transcribe.py`, `condition_on_previous_text`).
"""

from __future__ import annotations

from typing import Final

from asr_server.transcription.assembly import DecodedPart
from asr_server.transcription.prompt import MAX_PROMPT_TOKENS

UNRELIABLE_TEMPERATURE: Final = 0.5  # above it a text is no prompt for the next


class PreviousText:
    def __init__(self, prompt_tokens: tuple[int, ...]) -> None:
        self.tokens = prompt_tokens  # to decode the next part with

    def add(self, part: DecodedPart) -> None:
        """Timestamps stay within the text. A part in which nobody speaks changes nothing."""
        if part.result.temperature > UNRELIABLE_TEMPERATURE and part.num_read:
            self.tokens = ()
            return
        heard = tuple(token for span in part.spans for token in span.tokens)
        self.tokens = (*self.tokens, *heard)[-MAX_PROMPT_TOKENS:]
