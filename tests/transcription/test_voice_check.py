"""What is dropped as an invention, and what the embedded model passes over."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.audio.pool import PreprocessPool
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, Samples
from asr_server.transcription.segments import DecodedPart
from asr_server.transcription.voice_check import (
    KEPT_S,
    SpokenChunk,
    drop_inventions,
    holds_doubtful,
    listen,
    with_silences,
)
from tests.noises import make_noise
from tests.speech import VOICES, digits_of, say, silence
from tests.transcription.parts import COUGHS, LIKELY, TALK, TALK_S, UNLIKELY, part_of
from tests.transcription.pipeline import transcribe


@pytest.mark.parametrize("voice", VOICES)
async def test_a_digit_behind_a_long_pause_is_heard(voice: str) -> None:
    """Read in one piece, the window ends for the model with what comes before the pause."""
    sound = np.concatenate([say("31", voice).samples, silence(3.0), say("8", voice).samples])
    options = DecodingOptions(language="en", word_timestamps=True)
    transcript = await transcribe(EMBEDDED_MODEL, sound, options, check_voice=True)
    assert digits_of(transcript.text) == "318"
    times_s = [time for s in transcript.segments for word in s.words for time in (word.start_s, word.end_s)]
    assert times_s == sorted(times_s)


# -- By itself, on segments made up --------------------------------------------------------------------------


async def checked(part: DecodedPart, chunk: Chunk, num_sent: int = 0) -> DecodedPart:
    pool = PreprocessPool(1)
    try:
        return await drop_inventions(part, chunk, SpokenChunk([chunk]), pool, num_sent)
    finally:
        pool.shutdown()


async def test_behind_a_segment_without_a_voice_likely_ones_need_a_voice_too() -> None:
    talk_s = len(TALK) / SAMPLE_RATE
    part, chunk = part_of(
        np.concatenate([TALK, COUGHS]),
        (0.0, talk_s, UNLIKELY),
        (talk_s + 0.5, talk_s + 2, UNLIKELY),
        (talk_s + 2, talk_s + 3, LIKELY),
    )
    found = await checked(part, chunk)
    assert (found.spans, found.tail_s) == (part.spans[:1], None)


async def test_where_somebody_speaks_behind_a_dropped_segment_it_is_read_again_from_there() -> None:
    """Its words may be theirs, with times that are too early."""
    part, chunk = part_of(np.concatenate([COUGHS, TALK]), (0.0, 2.0, UNLIKELY), (2.0, 3.5, LIKELY))
    found = await checked(part, chunk)
    assert found.spans == ()
    assert found.tail_s == pytest.approx(4.0, abs=0.3)


async def test_a_segment_in_which_somebody_surely_speaks_is_beyond_doubt() -> None:
    part, chunk = part_of(np.concatenate([COUGHS, TALK]), (4.0, 4.0 + TALK_S, UNLIKELY))
    pool = PreprocessPool(1)
    try:
        spoken = await listen(chunk, pool)
    finally:
        pool.shutdown()
    assert not holds_doubtful(part, spoken)
    early, _ = part_of(chunk.samples, (0.0, 3.0, UNLIKELY))
    assert holds_doubtful(early, spoken)


async def test_what_has_been_sent_stands() -> None:
    part, chunk = part_of(COUGHS, (0.0, 1.0, UNLIKELY), (1.0, 2.0, UNLIKELY))
    assert (await checked(part, chunk, num_sent=1)).spans == part.spans[:1]


async def test_no_audio_of_kept_text_is_read_again() -> None:
    """The dropped segment begins just before speech: the lead would reach into the kept text."""
    part, chunk = part_of(
        np.concatenate([TALK, silence(0.1), COUGHS, TALK]),
        (0.0, TALK_S + 3.9, LIKELY),
        (TALK_S + 3.9, TALK_S + 4.0, UNLIKELY),
    )
    found = await checked(part, chunk)
    assert found.tail_s is None or found.tail_s >= part.spans[0].end_s
    assert found.tail_s is not None


async def test_text_that_whisper_judges_silence_stays_where_somebody_surely_speaks() -> None:
    always_silence = DecodingOptions(no_speech_threshold=-1.0, logprob_threshold=1.0)
    heard = await transcribe(EMBEDDED_MODEL, TALK, always_silence, check_voice=True)
    assert digits_of(heard.text) == "31415926"
    noise = await transcribe(EMBEDDED_MODEL, COUGHS, always_silence, check_voice=True)
    assert noise.text == ""


async def pieces_of(sound: Samples, start_sample: int = 0) -> list[tuple[float, float]]:
    pool = PreprocessPool(1)
    try:
        pieces = (await listen(Chunk(0, start_sample, sound), pool)).pieces
    finally:
        pool.shutdown()
    return [(piece.start_s, piece.start_s + piece.duration_s) for piece in pieces]


async def test_long_sounds_without_speech_are_left_out_but_for_a_second() -> None:
    hum = make_noise("hum", -30, 6.0)
    sound = np.concatenate([hum, TALK, hum, TALK, hum])
    (first_s, end_s), (second_s, last_s) = await pieces_of(sound)
    assert first_s == pytest.approx(6.0 - KEPT_S, abs=0.5)
    assert end_s == pytest.approx(6.0 + TALK_S + KEPT_S, abs=0.5)
    assert second_s == pytest.approx(12.0 + TALK_S - KEPT_S, abs=0.5)
    assert last_s == pytest.approx(12.0 + 2 * TALK_S + KEPT_S, abs=0.5)


async def test_what_has_no_long_sound_without_speech_and_what_has_no_speech_stay_whole() -> None:
    hum = make_noise("hum", -30, 2.0)
    for sound in (np.concatenate([hum, TALK, hum, TALK, hum]), make_noise("hum", -30, 8.0)):
        assert await pieces_of(sound, 7) == [pytest.approx((7 / SAMPLE_RATE, (7 + len(sound)) / SAMPLE_RATE))]


def test_where_nobody_may_speak_is_a_pause_for_words() -> None:
    chunk = Chunk(0, 20 * SAMPLE_RATE, silence(10.0))
    result = ChunkResult(
        (1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop", (0.0, 9.0), (8.5,), ((1.0, 1.1), (3.0, 5.5))
    )
    spoken = SpokenChunk([chunk], [(22.0, 23.0), (25.0, 28.0), (28.3, 29.0)])
    found = with_silences(result, chunk, spoken).pauses_s
    assert np.array(found) == pytest.approx(np.array([(0.0, 1.8), (3.0, 5.5), (9.2, 10.0)]))
    assert with_silences(result, chunk, SpokenChunk([chunk])) == result, "nobody has listened"
