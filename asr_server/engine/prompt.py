"""The tokens before a chunk's text: the text so far, language and task."""

from __future__ import annotations

from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import DecodingOptions


def previous_text(options: DecodingOptions, specials: SpecialTokens, num_positions: int) -> list[int]:
    """Return <|startofprev|> and the prompt's last tokens, at most half the positions less one."""
    if not options.prompt_tokens or specials.start_of_prev is None:
        return []
    return [specials.start_of_prev, *options.prompt_tokens[-(num_positions // 2 - 1) :]]


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
