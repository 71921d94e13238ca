"""Finds which words of a growing turn are stable: two successive readings agree on them. Used by `turn.py`.

Local agreement (Liu, Spanakis and Niehues, Interspeech 2020; Machacek, Dabre and Bojar, 2023). What has been
sent is never taken back: where a later reading differs, what follows as many words as were sent is sent.
"""

from __future__ import annotations

import re
import string
from itertools import takewhile
from typing import Final

import msgspec

from asr_server.transcription.language import UNSPACED

_WORD: Final = re.compile(r"\S+")


class Agreement(msgspec.Struct, frozen=True):
    """About one chunk."""

    num_sent: int = 0  # words
    last_reading: tuple[str, ...] = ()


def agree(agreement: Agreement, reading: str, language: str | None) -> tuple[Agreement, str]:
    """Takes one more reading of the growing chunk; the text that has become stable with it."""
    words = split_words(reading, language)
    pairs = zip(agreement.last_reading, words, strict=False)
    num_agreed = sum(1 for _ in takewhile(lambda pair: _plain(pair[0]) == _plain(pair[1]), pairs))
    num_sent = max(agreement.num_sent, num_agreed)
    return Agreement(num_sent, words), _join(words[agreement.num_sent : num_sent], language)


def conclude(agreement: Agreement, reading: str, language: str | None) -> str:
    """What remains to be sent of a chunk whose text is final."""
    return _join(split_words(reading, language)[agreement.num_sent :], language)


def split_words(text: str, language: str | None) -> tuple[str, ...]:
    """Words; characters in languages written without spaces."""
    return tuple(text.strip()) if language in UNSPACED else tuple(_WORD.findall(text))


def _join(words: tuple[str, ...], language: str | None) -> str:
    return ("" if language in UNSPACED else " ").join(words)


def _plain(word: str) -> str:
    """Punctuation and capitals change from reading to reading, and are no disagreement."""
    return word.strip(string.punctuation).casefold()
