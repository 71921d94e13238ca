"""Makes the prompt of a chunk's parts: the request's, followed by the text so far.

The rules are openai-whisper's (`transcribe.py`, `condition_on_previous_text`): the text of the chunk, or of
all chunks where the request asks for that. Used by `chunk_reader.py`; `api`, `realtime`, `wyoming.py` and
`offline` make the tokens of a request's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

from asr_server.transcription.segments import DecodedPart

# Half of Whisper's text positions, less <|startofprev|>: the rule of openai-whisper.
MAX_PROMPT_TOKENS: Final = 223
MAX_KEYWORD_TOKENS: Final = 110  # and a full stop: the keywords may not push the whole prompt out
MAX_BOOSTED_KEYWORDS: Final = 64
MAX_BOOSTED_CHARS: Final = 100  # of one: what is longer is a sentence
MAX_CHARS: Final = 8192  # more can never fit; keeps a huge field from costing time


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def prompt_tokens(encoder: Encoder, prompt: str, keywords: Sequence[str] = ()) -> tuple[int, ...]:
    """Text tokens to follow <|startofprev|>: keywords, then the prompt; of a long prompt the end is kept.

    A full stop ends the keywords: else speech that begins with one of them seems to continue the list.
    The text of special tokens in either is ordinary text to the encoder, never a command to the model.
    """
    listed = ", ".join(word.strip() for word in keywords if word.strip())
    keyword_tokens = _tokens(encoder, listed[:MAX_CHARS])[:MAX_KEYWORD_TOKENS]
    if keyword_tokens and not listed.endswith("."):
        keyword_tokens += encoder.encode(".")
    context = _tokens(encoder, prompt[-MAX_CHARS:])
    return (*keyword_tokens, *context[-(MAX_PROMPT_TOKENS - len(keyword_tokens)) :])


def boosted_keywords(keywords: Sequence[str]) -> tuple[str, ...]:
    """Return the keywords that get a bonus in decoding, each once: the first ones, as many as may."""
    terms = (word.strip() for word in keywords)
    kept = dict.fromkeys(term for term in terms if 0 < len(term) <= MAX_BOOSTED_CHARS)
    return tuple(islice(kept, MAX_BOOSTED_KEYWORDS))


def _tokens(encoder: Encoder, text: str) -> list[int]:
    text = text.strip()
    return encoder.encode(" " + text) if text else []


UNRELIABLE_TEMPERATURE: Final = 0.5  # above it a text is no prompt for the next


class PreviousText:
    def __init__(self, prompt_tokens: tuple[int, ...]) -> None:
        self.tokens = prompt_tokens  # to decode the next part with

    def add(self, part: DecodedPart) -> None:
        """Adds the part's text with its timestamp tokens. A part in which nobody speaks changes nothing."""
        if part.result.temperature > UNRELIABLE_TEMPERATURE and part.num_read:
            self.tokens = ()
            return
        heard = tuple(token for span in part.spans for token in span.tokens)
        self.tokens = (*self.tokens, *heard)[-MAX_PROMPT_TOKENS:]
