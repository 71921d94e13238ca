"""The tokens before a chunk's text, and the checks of a chunk before anything is computed."""

from __future__ import annotations

from typing import Final

import numpy as np

from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import POSITIONS_PER_S, DecodingOptions, Samples
from asr_server.model import WhisperSizes

BESIDE_GIVEN: Final = 3  # tokens: a language that is detected yet, <|notimestamps|> and the text's end


def prompt_of(
    options: DecodingOptions, language: str | None, specials: SpecialTokens, num_positions: int
) -> tuple[list[int], int]:
    """Return the prompt, and where <|startoftranscript|> is in it.

    The client's prompt keeps its last tokens, at most half the positions less one. Raises ValueError: the
    checkpoint cannot translate.
    """
    before: list[int] = []
    if options.prompt_tokens and specials.start_of_prev is not None:
        before = [specials.start_of_prev, *options.prompt_tokens[-(num_positions // 2 - 1) :]]
    return [*before, *sot_sequence(options, language, specials)], len(before)


def sot_sequence(options: DecodingOptions, language: str | None, specials: SpecialTokens) -> list[int]:
    task = specials.translate if options.task == "translate" else specials.transcribe
    if options.task == "translate" and (task is None or not specials.is_multilingual):
        raise ValueError("this checkpoint cannot translate")
    tokens = [specials.start_of_transcript]
    if specials.is_multilingual and language is not None:
        tokens.append(specials.languages[language])
    if specials.is_multilingual and task is not None:
        tokens.append(task)
    return tokens


def check_timestamps(specials: SpecialTokens, sizes: WhisperSizes) -> None:
    """Raise ValueError if the vocabulary has no timestamp for the window's end."""
    last_s = (sizes.vocabulary - 1 - specials.timestamp_begin) / POSITIONS_PER_S
    if last_s < sizes.window.duration_s:
        raise ValueError(
            f"the vocabulary's timestamps end at {last_s:g} s, the window at {sizes.window.duration_s:g} s"
        )


def checked_language(
    options: DecodingOptions, samples: Samples, specials: SpecialTokens, sizes: WhisperSizes
) -> str | None:
    """Return a chunk's language if it is given or only one is possible.

    Raises ValueError: the chunk cannot be decoded as asked.
    """
    language, possible = options.language, candidates(options, specials)
    if language is None and len(possible) == 1:
        language = possible[0]
    if not specials.is_multilingual:
        language = None
    elif language is not None and language not in specials.languages:
        raise ValueError(f"this checkpoint does not know the language {language!r}")
    if not options.temperatures or min(options.temperatures) < 0:
        raise ValueError("temperatures must be one or more numbers not below 0")
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ValueError("max_new_tokens must be at least 1")
    tokens = (*options.prompt_tokens, *options.given_tokens)
    if any(not 0 <= token < sizes.vocabulary for token in tokens):
        raise ValueError("a token of the prompt or the given text is not in this checkpoint's vocabulary")
    if len(samples) == 0 or not np.isfinite(samples).all():
        raise ValueError("no samples, or samples that are not finite")
    if len(samples) > sizes.window.num_samples:
        raise ValueError(f"the chunk is longer than the model's window of {sizes.window.duration_s:g} s")
    prompt, _ = prompt_of(options, language, specials, sizes.text_positions)
    if len(prompt) + BESIDE_GIVEN + len(options.given_tokens) > sizes.text_positions:
        raise ValueError(f"the given text has more than {sizes.text_positions} tokens")
    return language


def candidates(options: DecodingOptions, specials: SpecialTokens) -> list[str]:
    """Return the languages to choose from; none for an English-only model."""
    if not specials.is_multilingual:
        return []
    wanted = [code for code in options.candidate_languages if code in specials.languages]
    return wanted or list(specials.languages)
