"""Segments without words: their edges are moved to where somebody speaks, and no further."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.audio.pool import PreprocessPool
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, Samples
from asr_server.transcription.segments import DecodedPart, Span
from asr_server.transcription.voice_check import MARGIN_S, MIN_SILENCE_S, SpokenChunk, without_silent_edges
from tests.noises import make_noise
from tests.speech import say, silence

NEAR_S = 0.3  # what the detector is off in noise


def said(digits: str) -> Samples:
    """From the beginning of the first to the end of the last."""
    spoken = say(digits, "linda")
    return spoken.samples[round(spoken.times[0][0] * SAMPLE_RATE) : round(spoken.times[-1][1] * SAMPLE_RATE)]


FIRST, SECOND = said("830591"), said("742")


async def moved(
    sound: Samples, *times_s: tuple[float, float], part_start_s: float = 0.0
) -> list[tuple[float, float]]:
    """Of segments from start to end in seconds of a part that begins `part_start_s` after its chunk."""
    chunk = Chunk(0, 20 * SAMPLE_RATE, sound)
    spans = tuple(Span(start_s, end_s, (1,), (0.0,)) for start_s, end_s in times_s)
    result = ChunkResult((1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop")
    part = DecodedPart(20.0 + part_start_s, chunk.duration_s - part_start_s, result, spans, 1)
    pool = PreprocessPool(1)
    try:
        (found,) = await without_silent_edges([part], chunk, SpokenChunk([chunk]), pool)
    finally:
        pool.shutdown()
    return [(span.start_s, span.end_s) for span in found.spans]


def duration_s(samples: Samples) -> float:
    return len(samples) / SAMPLE_RATE


@pytest.mark.parametrize("noise", [silence(7.0), make_noise("pink", -40, 7.0), make_noise("hum", -30, 7.0)])
async def test_a_segment_begins_and_ends_where_somebody_speaks(noise: Samples) -> None:
    sound = np.concatenate([noise, FIRST, noise])
    end_s = 7.0 + duration_s(FIRST)
    ((start_s, stop_s),) = await moved(sound, (0.0, end_s + 7.0))
    assert start_s == pytest.approx(7.0 - MARGIN_S, abs=NEAR_S)
    assert stop_s == pytest.approx(end_s + MARGIN_S, abs=NEAR_S)


async def test_a_pause_between_segments_becomes_a_gap_and_none_overtakes_another() -> None:
    sound = np.concatenate([FIRST, silence(2.0), SECOND])
    first_s, second_s = duration_s(FIRST), duration_s(FIRST) + 2.0
    found = await moved(sound, (0.0, first_s + 1.0), (first_s + 1.0, duration_s(sound)))
    assert [time for times in found for time in times] == sorted(time for times in found for time in times)
    (_, end_s), (start_s, _) = found
    assert end_s == pytest.approx(first_s + MARGIN_S, abs=NEAR_S)
    assert start_s == pytest.approx(second_s - MARGIN_S, abs=NEAR_S)


async def test_times_are_left_that_are_nearly_right_or_lie_where_nobody_is_heard() -> None:
    off_s = MIN_SILENCE_S - 0.15
    sound = np.concatenate([silence(off_s), FIRST, silence(off_s), make_noise("white", -40, 3.0)])
    speech_end_s = off_s + duration_s(FIRST)
    times_s = [(0.0, speech_end_s + off_s), (speech_end_s + off_s + 0.5, duration_s(sound))]
    assert await moved(sound, *times_s) == times_s


async def test_times_of_a_later_part_count_from_that_part() -> None:
    sound = np.concatenate([FIRST, silence(3.0), SECOND])
    begins_s = duration_s(FIRST) + 0.3  # of the part
    ((start_s, _),) = await moved(sound, (0.0, duration_s(sound) - begins_s), part_start_s=begins_s)
    assert start_s == pytest.approx(2.7 - MARGIN_S, abs=NEAR_S)
