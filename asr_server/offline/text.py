"""Renders transcripts as bytes, and file names as lines that a terminal can show. Used by the outputs."""

from __future__ import annotations

from asr_server.core import Transcript
from asr_server.formats import DEFAULTS, RenderOptions, ResponseFormat, render


def rendered(
    transcript: Transcript, response_format: ResponseFormat, options: RenderOptions = DEFAULTS
) -> bytes:
    """UTF-8 whatever the locale says, ending in one line break."""
    return (render(transcript, response_format, options).rstrip("\n") + "\n").encode()


def printable(text: str) -> str:
    """As one line without control characters, which file names may have, and what is no text as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
