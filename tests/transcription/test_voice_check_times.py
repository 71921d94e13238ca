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


# -- On stretches of speech made up --------------------------------------------------------------------------


async def moved_within(
    span_s: tuple[float, float], certain_s: list[tuple[float, float]], possible_s: list[tuple[float, float]]
) -> tuple[float, float]:
    """A segment of a chunk that begins at 20 s, all times on the chunk's clock."""
    chunk = Chunk(0, 20 * SAMPLE_RATE, silence(12.0))
    result = ChunkResult((1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop")
    part = DecodedPart(20.0, chunk.duration_s, result, (Span(*span_s, (1,), (0.0,)),), 1)
    spoken = SpokenChunk([chunk], sorted([*certain_s, *possible_s]), certain_s).since(-20.0)
    pool = PreprocessPool(1)
    try:
        (found,) = await without_silent_edges([part], chunk, spoken, pool)
    finally:
        pool.shutdown()
    return found.spans[0].start_s, found.spans[0].end_s


@pytest.mark.parametrize(
    ("possible_s", "start_s"),
    [((1.0, 1.2), 4.8), ((4.2, 4.4), 4.0), ((1.0, 1.6), 0.8)],
    ids=["far and short", "near", "long"],
)
async def test_a_short_faint_sound_far_from_certain_speech_is_no_edge(
    possible_s: tuple[float, float], start_s: float
) -> None:
    behind_s = tuple(12.0 - time_s for time_s in reversed(possible_s))
    found = await moved_within((0.0, 12.0), [(5.0, 7.0)], [possible_s, (behind_s[0], behind_s[1])])
    assert found == pytest.approx((start_s, 12.0 - start_s))


async def test_where_nothing_is_certain_a_faint_sound_is_speech() -> None:
    assert await moved_within((0.0, 12.0), [], [(2.0, 2.3)]) == pytest.approx((1.8, 2.5))


async def test_the_edge_of_the_speech_beside_is_not_the_segments() -> None:
    """A model's times are often a third of a second off: in the sentence before, or in the one behind."""
    speech_s = [(0.5, 3.3), (5.0, 8.0), (9.5, 12.0)]
    assert await moved_within((3.0, 9.8), speech_s, []) == pytest.approx((4.8, 8.2))
    assert await moved_within((2.5, 10.2), speech_s, []) == pytest.approx((2.5, 10.2)), "that is a word"
    assert await moved_within((3.0, 4.0), speech_s, []) == pytest.approx((3.0, 3.5)), "there is no other"
