"""Find sentences that a model repeats: those of its prompt, and echoes of the segment before.

Models repeat the last sentence over another language, music or noise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from asr_server.checkpoint.tokenizer import MIN_TAIL_S, Tokenizer
from asr_server.transcription.segments import DecodedPart, Span, ending_at
from asr_server.transcription.voice_check import SpokenChunk

MIN_LETTERS: Final = 12  # people say shorter sentences twice ("Yes, yes.")
MOST_LETTERS_PER_S: Final = 30.0  # nobody says more


def letters_of(span: Span, tokenizer: Tokenizer) -> str:
    return _letters(tokenizer.decode(span.tokens))


@lru_cache(1024)
def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def said_in(parts: Sequence[DecodedPart], tokenizer: Tokenizer) -> set[str]:
    letters = {letters_of(span, tokenizer) for part in parts for span in part.spans}
    return {text for text in letters if len(text) >= MIN_LETTERS}


def until_repetition(
    part: DecodedPart, prompt: Collection[str], tokenizer: Tokenizer, num_sent: int = 0
) -> DecodedPart | None:
    """Return the part up to the first segment that repeats its prompt; None if none does."""
    for number in range(num_sent, len(part.spans)):
        if letters_of(part.spans[number], tokenizer) in prompt:
            tail_s = part.spans[number - 1].end_s if number else 0.0
            cut = ending_at(part, number, tail_s)
            has_tail = part.duration_s - tail_s >= MIN_TAIL_S
            return cut if has_tail else msgspec.structs.replace(cut, tail_s=None)
    return None


def without_echoes(
    part: DecodedPart, before: str, spoken: SpokenChunk, tokenizer: Tokenizer, num_sent: int = 0
) -> DecodedPart:
    """Drop segments that equal the one before in too little certain speech.

    Args:
        before: letters of the segment before the part.
    """
    kept: list[Span] = []
    for number, span in enumerate(part.spans):
        letters = letters_of(span, tokenizer)
        is_equal = letters == before and len(letters) >= MIN_LETTERS
        if number < num_sent or not is_equal or _is_spoken(span, part, spoken, len(letters)):
            kept.append(span)
        before = letters
    return msgspec.structs.replace(part, spans=tuple(kept))


def _is_spoken(span: Span, part: DecodedPart, spoken: SpokenChunk, num_letters: int) -> bool:
    spoken_s = spoken.certainly_spoken_s(part.start_s + span.start_s, part.start_s + span.end_s)
    return not spoken.certain_s or spoken_s >= num_letters / MOST_LETTERS_PER_S
