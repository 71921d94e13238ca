"""Joins the texts of chunks into one text."""

from __future__ import annotations

from asr_server.transcription.language import UNSPACED


def continuation(so_far: str, text: str, language: str | None) -> str:
    """What `text` adds to the end of `so_far`: no space around the whole, one between two stretches.

    Languages written without spaces get one only where the model wrote it.
    """
    words = text.strip()
    if not so_far or not words:
        return words
    spaced = language not in UNSPACED or text[0].isspace()
    return f" {words}" if spaced else words
