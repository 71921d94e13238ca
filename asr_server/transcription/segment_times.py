"""Moves a segment's times inward, to where somebody begins and ceases to speak. Used by `chunk_reader.py`.

The model often writes 0.0 for the first segment of a window, whatever comes before the speech, and ends a
segment where the next one begins, whatever pause lies between. Times of aligned words are better, and then
segments take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from asr_server.audio import PreprocessPool, possible_speech_s
from asr_server.core import Chunk
from asr_server.transcription.assembly import DecodedPart, Span

MIN_SILENCE_S: Final = 0.4  # at a segment's edge: with less its time is left as the model wrote it
MIN_SPEECH_S: Final = (
    0.1  # within a segment; less is the end of the word before it, or the next one's beginning
)
MARGIN_S: Final = 0.2  # kept around speech: a faint beginning or a last consonant is no voice to the detector

Stretch = tuple[float, float]  # start and end in seconds


async def without_silent_edges(
    parts: Sequence[DecodedPart], chunk: Chunk, pool: PreprocessPool
) -> list[DecodedPart]:
    """The chunk's parts, with segments that begin and end near a voice. Text and words stay as they are."""
    if not any(part.spans for part in parts):
        return list(parts)
    speech_s = await pool.run(possible_speech_s, chunk.samples)
    return [_without_silent_edges(part, part.start_s - chunk.start_s, speech_s) for part in parts]


def _without_silent_edges(part: DecodedPart, offset_s: float, speech_s: Sequence[Stretch]) -> DecodedPart:
    """`speech_s` count from the chunk's start, `offset_s` before the part's."""
    stretches = [(start_s - offset_s, end_s - offset_s) for start_s, end_s in speech_s]
    return msgspec.structs.replace(part, spans=tuple(_moved_inward(span, stretches) for span in part.spans))


def _moved_inward(span: Span, speech_s: Sequence[Stretch]) -> Span:
    """A segment in which the detector hears nobody has nowhere to move to."""
    within = [
        (start_s, end_s)
        for start_s, end_s in speech_s
        if min(end_s, span.end_s) - max(start_s, span.start_s) >= MIN_SPEECH_S
    ]
    if not within:
        return span
    start_s, end_s = within[0][0], within[-1][1]
    return msgspec.structs.replace(
        span,
        start_s=start_s - MARGIN_S if start_s - span.start_s >= MIN_SILENCE_S else span.start_s,
        end_s=end_s + MARGIN_S if span.end_s - end_s >= MIN_SILENCE_S else span.end_s,
    )
