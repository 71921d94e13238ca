"""What is dropped as an invention, and what the embedded model passes over."""

from __future__ import annotations

import msgspec
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
    is_trusted,
    listen,
    on_frame_s,
    tail_before_s,
    with_silences,
)
from tests.fake_replica import noise
from tests.fake_replica import say as answer
from tests.noises import make_noise
from tests.speech import VOICES, digits_of, say, silence
from tests.transcription.parts import COUGHS, LIKELY, TALK, TALK_S, UNLIKELY, part_of
from tests.transcription.pipeline import transcribe
from tests.vocabulary import words


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


async def listened_to(chunk: Chunk) -> SpokenChunk:
    pool = PreprocessPool(1)
    try:
        return await listen(chunk, pool)
    finally:
        pool.shutdown()


async def pieces_of(sound: Samples, start_sample: int = 0) -> list[tuple[float, float]]:
    pieces = (await listened_to(Chunk(0, start_sample, sound))).pieces
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


@pytest.mark.parametrize(("level", "is_kept"), [(0.0, False), (0.02, False), (0.2, True)])
async def test_the_whole_chunk_is_kept_where_what_is_left_out_is_loud(level: float, is_kept: bool) -> None:
    """The speech is at 0.05; noise is no speech at any level."""
    talk = TALK * np.float32(0.05 / np.std(TALK))
    sound = np.concatenate([talk, noise(6.0) * np.float32(level / 0.1), talk])
    chunk = Chunk(0, SAMPLE_RATE, sound)
    spoken = await listened_to(chunk)
    assert len(spoken.pieces) == 2
    assert spoken.uncut == (SpokenChunk([chunk], (), spoken.certain_s) if is_kept else None)


@pytest.mark.parametrize(
    ("logprob", "no_speech_prob", "num_letters", "is_trusted_"),
    [
        (-0.6, 0.2, 50, True),
        (-0.6, 0.2, 49, False),
        (-0.61, 0.2, 100, False),
        (-0.41, 0.21, 100, False),
        (-0.4, 0.21, 50, True),
        (-0.4, 0.21, 49, False),
    ],
)
def test_a_text_is_trusted_if_it_fills_its_time_and_is_beyond_doubt_or_probable(
    logprob: float, no_speech_prob: float, num_letters: int, is_trusted_: bool
) -> None:
    result = answer(*words("12"), avg_logprob=logprob, no_speech_prob=no_speech_prob)
    assert is_trusted(result, "a" * num_letters, 10.0) == is_trusted_
    assert not is_trusted(answer(), "", 10.0)


def test_where_nobody_may_speak_is_a_pause_for_words() -> None:
    chunk = Chunk(0, 20 * SAMPLE_RATE, silence(10.0))
    result = ChunkResult(
        (1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop", (0.0, 9.0), (8.5,), ((1.0, 1.1), (3.0, 5.5))
    )
    spoken = SpokenChunk([chunk], [(22.0, 23.0), (25.0, 28.0), (28.3, 29.0)])
    found = with_silences(result, chunk, spoken).pauses_s
    assert np.array(found) == pytest.approx(np.array([(0.0, 1.8), (3.0, 5.5), (9.2, 10.0)]))
    assert with_silences(result, chunk, SpokenChunk([chunk])) == result, "nobody has listened"


def test_speech_is_clipped_to_what_is_asked_for_and_moved_to_another_clock() -> None:
    chunk = Chunk(0, 0, silence(10.0))
    spoken = SpokenChunk([chunk], [(0.5, 3.0)], [(1.0, 2.0), (3.0, 5.0), (6.0, 7.5)])
    assert spoken.certain_within(1.5, 6.0) == [(1.5, 2.0), (3.0, 5.0)]
    assert spoken.certainly_spoken_s(1.5, 7.0) == 3.5
    moved = spoken.since(0.5)
    assert (moved.possible_s, moved.certain_s[0], moved.pieces) == ([(0.0, 2.5)], (0.5, 1.5), [chunk])


def test_audio_is_read_again_from_a_frame_before_speech_and_not_from_its_start() -> None:
    chunk = Chunk(0, 0, silence(10.0))
    assert tail_before_s(2.0, 0.0, chunk) == pytest.approx(1.7)
    assert tail_before_s(2.0, 1.8, chunk) == pytest.approx(1.8), "kept text is not read again"
    assert tail_before_s(0.8, 0.0, chunk) == 0.5
    assert tail_before_s(0.785, 0.0, chunk) is None, "the same audio has the same text"
    assert on_frame_s(1.2301, chunk) == pytest.approx(1.24)
    assert on_frame_s(1.23, Chunk(0, 40, chunk.samples)) == pytest.approx(1.2375), "of the file"


@pytest.mark.parametrize(
    ("logprob", "no_speech_prob", "is_doubtful"),
    [(-0.59, 0.2, False), (-0.61, 0.0, True), (-0.1, 0.21, True), (-0.6, 0.0, False)],
)
@pytest.mark.parametrize(("certain_s", "is_sure"), [(0.5, True), (0.49, False)])
def test_text_is_doubtful_by_its_probability_or_silence_unless_half_a_second_is_certain(
    logprob: float, no_speech_prob: float, is_doubtful: bool, certain_s: float, is_sure: bool
) -> None:
    part, chunk = part_of(silence(10.0), (1.0, 3.0, logprob))
    result = msgspec.structs.replace(part.result, no_speech_prob=no_speech_prob)
    later = msgspec.structs.replace(part, start_s=20.0, result=result)
    spoken = SpokenChunk([chunk], (), [(22.0, 22.0 + certain_s), (23.0, 29.0)])
    assert holds_doubtful(later, spoken) == (is_doubtful and not is_sure)


def test_a_segment_of_several_tokens_is_judged_by_their_mean() -> None:
    part, chunk = part_of(silence(10.0), (1.0, 3.0, -0.1))
    for logprobs, is_doubtful in (((-1.0, -0.1), False), ((-1.0, -0.3), True)):
        span = msgspec.structs.replace(part.spans[0], tokens=(1, 1), logprobs=logprobs)
        doubted = msgspec.structs.replace(part, spans=(span,))
        assert holds_doubtful(doubted, SpokenChunk([chunk])) == is_doubtful


async def test_a_chunk_under_three_seconds_is_not_listened_to() -> None:
    for duration_s, is_heard in ((2.99, False), (3.0, True)):
        pool, sound = PreprocessPool(1), np.resize(TALK, round(duration_s * SAMPLE_RATE))
        try:
            spoken = await listen(Chunk(0, 5 * SAMPLE_RATE, sound), pool)
        finally:
            pool.shutdown()
        assert bool(spoken.possible_s) == bool(spoken.certain_s) == is_heard
        assert all(start_s >= 5.0 for start_s, _ in spoken.possible_s), "on the file's clock"


async def test_a_piece_begins_and_ends_where_sound_without_speech_is_three_seconds_long() -> None:
    """Before, between and behind, on whole frames of the file."""
    for gap_s, num_pieces in ((1.0, 1), (4.5, 2)):
        hum = make_noise("hum", -30, gap_s)
        pieces = await pieces_of(np.concatenate([TALK, hum, TALK]), 7)
        assert len(pieces) == num_pieces
        assert pieces[0][0] == 7 / SAMPLE_RATE
        assert [round(start_s * SAMPLE_RATE) % 160 for start_s, _ in pieces[1:]] == [0] * (num_pieces - 1)
    around = await pieces_of(np.concatenate([make_noise("hum", -30, 4.5), TALK, make_noise("hum", -30, 2.0)]))
    assert len(around) == 1
    assert around[0][0] == pytest.approx(3.5, abs=0.5)
    assert around[0][1] == pytest.approx(6.5 + TALK_S)


def test_silences_of_two_fifths_of_a_second_part_words() -> None:
    chunk = Chunk(0, 0, silence(10.0))
    result = ChunkResult((1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop", (0.0, 9.0), (8.5,), ())
    for gap_s, num_pauses in ((0.78, 0), (0.82, 1)):
        spoken = SpokenChunk([chunk], [(0.0, 4.0), (4.0 + gap_s, 10.0)])
        assert len(with_silences(result, chunk, spoken).pauses_s) == num_pauses
    untimed = msgspec.structs.replace(result, token_times_s=())
    assert with_silences(untimed, chunk, SpokenChunk([chunk], [(2.0, 4.0)])) == untimed
