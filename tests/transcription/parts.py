"""Parts whose segments a test makes up, over a sound that the voice detector knows."""

from __future__ import annotations

from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, Samples
from asr_server.transcription.segments import DecodedPart, Span
from tests.noises import make_noise
from tests.speech import say

COUGHS, TALK = make_noise("coughs", -20, 4.0, 1), say("31415926", "rms").samples
TALK_S = len(TALK) / SAMPLE_RATE
LIKELY, UNLIKELY = -0.1, -1.0


def part_of(sound: Samples, *segments: tuple[float, float, float]) -> tuple[DecodedPart, Chunk]:
    """Segments from start to end in seconds, each with the log-probability of its tokens."""
    chunk = Chunk(0, 0, sound)
    result = ChunkResult((1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop")
    spans = tuple(Span(start_s, end_s, (1,), (logprob,)) for start_s, end_s, logprob in segments)
    return DecodedPart(0.0, chunk.duration_s, result, spans, 1), chunk
