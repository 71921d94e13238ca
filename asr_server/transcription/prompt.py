"""Make each part's prompt: the request's, then the text so far.

The rules are openai-whisper's (`transcribe.py`, `condition_on_previous_text`): the chunk's text, or all
chunks' on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

from asr_server.transcription.segments import DecodedPart

# Half of Whisper's text positions, less <|startofprev|>: the rule of openai-whisper.
MAX_PROMPT_TOKENS: Final = 223
MAX_BOOSTED_KEYWORDS: Final = 64
MAX_BOOSTED_CHARS: Final = 100  # of one: what is longer is a sentence
MAX_CHARS: Final = 8192  # more can never fit; keeps a huge field from costing time


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def prompt_tokens(encoder: Encoder, prompt: str) -> tuple[int, ...]:
    """Return the tokens after <|startofprev|>: the end of the prompt. Special tokens' text is plain.

    Keywords are not among them: a list before the speech costs a word in a hundred elsewhere.
    """
    text = prompt[-MAX_CHARS:].strip()
    return tuple(encoder.encode(" " + text)[-MAX_PROMPT_TOKENS:]) if text else ()


def boosted_keywords(keywords: Sequence[str]) -> tuple[str, ...]:
    """Return the keywords that get a bonus in decoding, each once: the first ones, as many as may."""
    terms = (word.strip() for word in keywords)
    kept = dict.fromkeys(term for term in terms if 0 < len(term) <= MAX_BOOSTED_CHARS)
    return tuple(islice(kept, MAX_BOOSTED_KEYWORDS))


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
