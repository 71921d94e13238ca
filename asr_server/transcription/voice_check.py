"""Drops segments that a model invents where nobody speaks. Used by `chunk_reader.py`.

Whisper's own judgement (`assembly.is_silence`) is a matter of its training, and of a whole chunk: a bark can
be a "five", between two that somebody said. A segment in doubt is therefore kept only where a voice detector
hears speech in its own stretch of audio. Segments beyond doubt, nearly all of real speech, cost nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from asr_server.audio import LIKELY, SURE, PreprocessPool, holds_speech
from asr_server.core import SAMPLE_RATE, Chunk, Samples
from asr_server.transcription.assembly import DecodedPart, Span

DOUBTFUL_LOGPROB: Final = -0.6
DOUBTFUL_NO_SPEECH: Final = 0.2
IMPROBABLE_LOGPROB: Final = -1.0  # as Whisper has it: then the detector must be surer
MARGIN_S: Final = 0.2  # on both sides of a segment: what its times may be off


def holds_doubtful(part: DecodedPart) -> bool:
    return any(_is_doubtful(span, part) for span in part.spans)


async def without_invented(
    part: DecodedPart, chunk: Chunk, pool: PreprocessPool, num_sent: int = 0
) -> DecodedPart:
    """The part without segments that are in doubt and in whose time nobody speaks.

    Args:
        chunk: what the part was read from.
        num_sent: segments at its beginning that a client has already, so that they stand.
    """
    kept = [
        span
        for number, span in enumerate(part.spans)
        if number < num_sent
        or not _is_doubtful(span, part)
        or await pool.run(holds_speech, _samples_of(span, chunk), _needed_probability(span))
    ]
    return msgspec.structs.replace(part, spans=tuple(kept))


def _is_doubtful(span: Span, part: DecodedPart) -> bool:
    return part.result.no_speech_prob > DOUBTFUL_NO_SPEECH or _avg_logprob(span) < DOUBTFUL_LOGPROB


def _needed_probability(span: Span) -> float:
    return SURE if _avg_logprob(span) < IMPROBABLE_LOGPROB else LIKELY


def _avg_logprob(span: Span) -> float:
    return float(np.mean(span.logprobs))


def _samples_of(span: Span, chunk: Chunk) -> Samples:
    first, end = ((span.start_s - MARGIN_S) * SAMPLE_RATE, (span.end_s + MARGIN_S) * SAMPLE_RATE)
    return chunk.samples[max(0, round(first)) : round(end)]
