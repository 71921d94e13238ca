"""Judge the temperature ladder's tries: by openai/whisper's rules for another, ours for the best."""

from __future__ import annotations

import zlib
from typing import Final

from asr_server.core import ChunkResult, DecodingOptions

# A sentence that somebody says twice compresses to less than this; a loop of the model's to a fifth and less.
LOOP_COMPRESSION_RATIO: Final = 3.5


def repeats_a_little(result: ChunkResult) -> bool:
    """Return whether a repetitive text may be real speech; a loop that was cut off is not."""
    return result.finish_reason == "stop" and result.compression_ratio <= LOOP_COMPRESSION_RATIO


def compression_ratio(text: str) -> float:
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def needs_fallback(result: ChunkResult, options: DecodingOptions) -> bool:
    return is_implausible(result, options) and not result.is_silence(options)


def is_broken(result: ChunkResult) -> bool:
    return is_no_number(result.avg_logprob)


def is_no_number(logprob: float) -> bool:
    return not logprob <= 1.0  # NaN, or no logarithm of a probability, whatever the rounding


def is_implausible(result: ChunkResult, options: DecodingOptions) -> bool:
    return result.avg_logprob < options.logprob_threshold or is_repetitive(result, options)


def is_repetitive(result: ChunkResult, options: DecodingOptions) -> bool:
    return result.compression_ratio > options.compression_ratio_threshold
