"""Checks a submitted chunk and its options before anything is computed. Used by `engine.py`."""

from __future__ import annotations

import numpy as np

from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import POSITIONS_PER_S, DecodingOptions
from asr_server.engine.sequence import Sequence
from asr_server.model import WhisperSizes


def check_timestamps(specials: SpecialTokens, sizes: WhisperSizes) -> None:
    """Raises ValueError where the vocabulary has no timestamp for the end of the window."""
    last_s = (sizes.vocabulary - 1 - specials.timestamp_begin) / POSITIONS_PER_S
    if last_s < sizes.window.duration_s:
        raise ValueError(
            f"the vocabulary's timestamps end at {last_s:g} s, the window at {sizes.window.duration_s:g} s"
        )


def check(sequence: Sequence, specials: SpecialTokens, sizes: WhisperSizes) -> None:
    """Settles the language where it is plain.

    Raises:
        ValueError: the chunk cannot be decoded as asked; the message says why.
    """
    options = sequence.options
    possible = candidates(options, specials)
    if sequence.language is None and len(possible) == 1:
        sequence.language = possible[0]
    if not specials.is_multilingual:
        sequence.language = None
    elif sequence.language is not None and sequence.language not in specials.languages:
        raise ValueError(f"this checkpoint does not know the language {sequence.language!r}")
    if not options.temperatures or min(options.temperatures) < 0:
        raise ValueError("temperatures must be one or more numbers not below 0")
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ValueError("max_new_tokens must be at least 1")
    if any(not 0 <= token < sizes.vocabulary for token in options.prompt_tokens):
        raise ValueError("a prompt token is not in this checkpoint's vocabulary")
    if len(sequence.samples) == 0 or not np.isfinite(sequence.samples).all():
        raise ValueError("no samples, or samples that are no numbers")
    if len(sequence.samples) > sizes.window.num_samples:
        raise ValueError(f"the chunk is longer than the model's window of {sizes.window.duration_s:g} s")
    sequence.set_prompt(specials, sizes.text_positions)


def candidates(options: DecodingOptions, specials: SpecialTokens) -> list[str]:
    """Languages to choose from: the request's as far as known, else all; English-only has none."""
    if not specials.is_multilingual:
        return []
    wanted = [code for code in options.candidate_languages if code in specials.languages]
    return wanted or list(specials.languages)
