"""Drops texts that a model invents where nobody speaks. Used by `transcriber.py`.

Whisper's own judgement (`assembly.is_silence`) is a matter of its training: a bark can be a confident "five".
A text in doubt is therefore kept only where a voice detector hears speech in its chunk. Texts beyond doubt,
nearly all of real speech, cost nothing.
"""

from __future__ import annotations

from typing import Final

from asr_server.audio import PreprocessPool, holds_speech
from asr_server.core import Chunk, ChunkResult

DOUBTFUL_LOGPROB: Final = -0.6  # of invented words, the most confident had -0.8
DOUBTFUL_NO_SPEECH: Final = 0.2


def is_doubtful(result: ChunkResult) -> bool:
    """Whether a text may be one of a chunk in which nobody speaks."""
    return result.avg_logprob < DOUBTFUL_LOGPROB or result.no_speech_prob > DOUBTFUL_NO_SPEECH


class VoiceCheck:
    """Of one chunk, however many parts it is read in: the detector runs at most once."""

    def __init__(self, pool: PreprocessPool, chunk: Chunk) -> None:
        self._pool, self._chunk = pool, chunk
        self._holds_speech: bool | None = None

    async def is_invented(self, result: ChunkResult) -> bool:
        if not result.tokens or not is_doubtful(result):
            return False
        if self._holds_speech is None:
            self._holds_speech = await self._pool.run(holds_speech, self._chunk.samples)
        return not self._holds_speech
