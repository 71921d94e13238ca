"""Turns a prompt and keywords into the tokens that precede the transcript.

The API and the offline command call it when they make decoding options. It runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

# Half of Whisper's text positions, less <|startofprev|>: the rule of openai-whisper.
MAX_PROMPT_TOKENS: Final = 223
MAX_KEYWORD_TOKENS: Final = 111  # the keywords may not push the whole prompt out
MAX_CHARS: Final = 8192  # more can never fit; keeps a huge field from costing time


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def prompt_tokens(encoder: Encoder, prompt: str, keywords: Sequence[str] = ()) -> tuple[int, ...]:
    """Text tokens for <|startofprev|>: keywords first, then the prompt, whose end is what counts.

    The text of special tokens in either is ordinary text to the encoder, never a command to the model.
    """
    listed = ", ".join(word.strip() for word in keywords if word.strip())
    heard_for = _tokens(encoder, listed[:MAX_CHARS])[:MAX_KEYWORD_TOKENS]
    context = _tokens(encoder, prompt[-MAX_CHARS:])
    return (*heard_for, *context[-(MAX_PROMPT_TOKENS - len(heard_for)) :])


def _tokens(encoder: Encoder, text: str) -> list[int]:
    text = text.strip()
    return encoder.encode(" " + text) if text else []
