"""Group tokens into words, as openai/whisper does: by characters, by spaces, punctuation with its word."""

from __future__ import annotations

import codecs
import string
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from asr_server.checkpoint.tokenizer import Tokenizer

# The sets of openai/whisper.
WITH_THE_NEXT_WORD: Final = "\"'“¿([{-"
WITH_THE_WORD_BEFORE: Final = "\"'.。,，!！?？:：”)]}、"


class WordGroup(NamedTuple):
    text: str
    first: int
    end: int


def group_words(tokens: Sequence[int], tokenizer: Tokenizer, spaced: bool) -> list[WordGroup]:
    """Group text tokens.

    Args:
        spaced: whether words are separated by spaces; else every character is a word.
    """
    groups = list(_characters(tokens, tokenizer))
    words = _join_up_to_spaces(groups) if spaced else groups
    return _join_to_word_before(_join_to_next_word(words))


def _characters(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[WordGroup]:
    decoder, first = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
    for end, token in enumerate(tokens, start=1):
        decoder.decode(tokenizer.decode_bytes(token))
        pending, _ = decoder.getstate()
        if not pending or end == len(tokens):
            yield WordGroup(tokenizer.decode(tokens[first:end]), first, end)
            first = end


def _join_up_to_spaces(groups: Sequence[WordGroup]) -> list[WordGroup]:
    words: list[WordGroup] = []
    for group in groups:
        if not words or group.text.startswith(" ") or group.text.strip() in string.punctuation:
            words.append(group)
        else:
            words[-1] = WordGroup(words[-1].text + group.text, words[-1].first, group.end)
    return words


def _join_to_next_word(words: Sequence[WordGroup]) -> list[WordGroup]:
    joined: list[WordGroup] = []  # from the last on
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in WITH_THE_NEXT_WORD:
            joined[-1] = joined[-1]._replace(text=word.text + joined[-1].text)
        else:
            joined.append(word)
    return joined[::-1]


def _join_to_word_before(words: Sequence[WordGroup]) -> list[WordGroup]:
    joined: list[WordGroup] = []
    for word in words:
        if joined and not joined[-1].text.endswith(" ") and word.text in WITH_THE_WORD_BEFORE:
            joined[-1] = joined[-1]._replace(text=joined[-1].text + word.text)
        else:
            joined.append(word)
    return joined
