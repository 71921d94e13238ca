"""Which language a request is in, when it does not say: found on the first chunk with speech."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from asr_server.transcription.language import likeliest

CONFIDENT: Final = 0.5  # above it the other chunks need not wait until this one's text is there


class Detection:
    """Lets one chunk at a time through to detect, and the others wait, until the language is known."""

    def __init__(self, code: str | None, candidates: tuple[str, ...] = ()) -> None:
        self.code = code  # once known
        self.guess = code  # the likeliest so far, perhaps of a chunk without speech
        self._candidates = candidates
        self._trial: asyncio.Event | None = None  # set when the chunk that detects has shown what it can

    async def turn(self) -> str | None:
        """The language to decode the next chunk with; None: this chunk is the one that detects."""
        while self.code is None:
            if self._trial is None or self._trial.is_set():
                self._trial = asyncio.Event()
                return None
            await self._trial.wait()
        return self.code

    def choose(self, probabilities: Mapping[str, float]) -> str:
        """The language for the chunk that detects; for all the others too when there is little doubt."""
        self.guess = likeliest(probabilities, self._candidates)
        total = sum(
            p for code, p in probabilities.items() if not self._candidates or code in self._candidates
        )
        if total and probabilities[self.guess] / total >= CONFIDENT:
            self._settle(self.guess)
        return self.guess

    def conclude(self, language: str | None) -> None:
        """The chunk that detects was read in `language`, or held no speech (None): then the next tries."""
        if self.code is None:
            self._settle(language)

    def _settle(self, language: str | None) -> None:
        self.code = language
        if self._trial is not None:
            self._trial.set()
