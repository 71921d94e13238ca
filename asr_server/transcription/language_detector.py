"""Finds the language of a request that names none, on its first chunk with speech."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from asr_server.transcription.language import likeliest

CONFIDENT: Final = 0.5  # above it the other chunks need not wait until this one's text is there


class LanguageDetector:
    """Lets one chunk at a time through to detect, and the others wait, until the language is known."""

    def __init__(self, code: str | None, candidates: tuple[str, ...] = ()) -> None:
        self.code = code  # once known
        self.guess = code  # the likeliest so far, perhaps of a chunk without speech
        self._candidates = candidates
        self._probe_finished: asyncio.Event | None = None  # by the chunk that detects

    async def next_language(self) -> str | None:
        """The language to decode the next chunk with; None: this chunk is the one that detects."""
        while self.code is None:
            if self._probe_finished is None or self._probe_finished.is_set():
                self._probe_finished = asyncio.Event()
                return None
            await self._probe_finished.wait()
        return self.code

    def on_probabilities(self, probabilities: Mapping[str, float]) -> str:
        """The language for the chunk that detects; for all the others too when there is little doubt."""
        self.guess = likeliest(probabilities, self._candidates)
        total = sum(
            p for code, p in probabilities.items() if not self._candidates or code in self._candidates
        )
        if total and probabilities[self.guess] / total >= CONFIDENT:
            self._set_language(self.guess)
        return self.guess

    def on_decoded(self, language: str | None) -> None:
        """The chunk that detects was read in `language`, or held no speech (None): then the next tries."""
        if self.code is None:
            self._set_language(language)

    def _set_language(self, language: str | None) -> None:
        self.code = language
        if self._probe_finished is not None:
            self._probe_finished.set()
