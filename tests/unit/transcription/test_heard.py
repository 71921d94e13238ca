"""Where speech is in a chunk, which stretches of it are read, and which pauses part words."""

import msgspec
import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, Samples
from asr_server.transcription.heard import KEPT_S, Heard, hear
from tests.support.fake_replica import noise
from tests.support.noises import make_noise
from tests.support.speech import silence
from tests.unit.transcription.parts import TALK, TALK_S

CHUNK = Chunk(0, 0, silence(10.0))


def stretches_of(sound: Samples, start_sample: int = 0) -> list[tuple[float, float]]:
    stretches = hear(Chunk(0, start_sample, sound)).stretches
    return [(stretch.start_s, stretch.start_s + stretch.duration_s) for stretch in stretches]


def test_long_sounds_without_speech_are_left_out_but_for_a_second() -> None:
    hum = make_noise("hum", -30, 6.0)
    stretches_s = stretches_of(np.concatenate([hum, TALK, hum, TALK, hum]))
    speech_s = [(6.0, 6.0 + TALK_S), (12.0 + TALK_S, 12.0 + 2 * TALK_S)]
    expected = [(start_s - KEPT_S, end_s + KEPT_S) for start_s, end_s in speech_s]
    assert stretches_s == [pytest.approx(each, abs=0.5) for each in expected]


@pytest.mark.parametrize("sound", [np.concatenate([TALK, silence(1.0), TALK]), make_noise("hum", -30, 8.0)])
def test_a_chunk_without_a_long_sound_beside_speech_or_without_any_speech_stays_whole(sound: Samples) -> None:
    assert stretches_of(sound, 7) == [pytest.approx((7 / SAMPLE_RATE, (7 + len(sound)) / SAMPLE_RATE))]


def test_a_piece_begins_on_a_frame_of_the_file() -> None:
    first, second = stretches_of(np.concatenate([TALK, make_noise("hum", -30, 4.5), TALK]), 7)
    assert first[0] == 7 / SAMPLE_RATE
    assert round(second[0] * SAMPLE_RATE) % 160 == 0


@pytest.mark.parametrize(("level", "is_kept"), [(0.0, False), (0.02, False), (0.2, True)])
def test_what_is_left_out_may_hide_speech_where_it_is_loud(level: float, is_kept: bool) -> None:
    """The speech is at 0.05; noise is no speech at any level."""
    talk = TALK * np.float32(0.05 / np.std(TALK))
    chunk = Chunk(0, SAMPLE_RATE, np.concatenate([talk, noise(6.0) * np.float32(level / 0.1), talk]))
    heard = hear(chunk)
    assert len(heard.stretches) == 2
    assert heard.is_loud_between == is_kept
    edges = [(around.start_s, around.start_s + around.duration_s) for around in map(heard.around, range(2))]
    assert edges[0][0] == chunk.start_s
    assert edges[0][1] == pytest.approx(edges[1][0], abs=0.01)
    assert edges[0][1] == pytest.approx(1 + len(TALK) / SAMPLE_RATE + 3, abs=0.7), "the middle between them"
    assert edges[1][1] == chunk.start_s + chunk.duration_s


def test_a_piece_may_be_cut_in_its_pauses_with_a_second_of_speech_on_both_sides() -> None:
    speech_s = [(0.5, 2.0), (2.3, 4.0), (4.1, 6.0), (6.5, 7.0), (7.5, 9.0)]
    stretches = Heard(CHUNK, [CHUNK], speech_s, speech_s, is_checked=True).apart.stretches
    edges_s = [(stretch.start_s, stretch.start_s + stretch.duration_s) for stretch in stretches]
    assert edges_s == [pytest.approx(each) for each in ((0.0, 2.15), (2.15, 6.25), (6.25, 10.0))]


def test_speech_is_on_the_clock_of_the_file_however_short_the_chunk() -> None:
    heard = hear(Chunk(0, 5 * SAMPLE_RATE, np.resize(TALK, 2 * SAMPLE_RATE)))
    assert heard.certain_s
    assert all(5.0 <= start_s < end_s <= 7.1 for start_s, end_s in [*heard.possible_s, *heard.certain_s])


def test_speech_and_pauses_are_clipped_to_the_time_asked_for() -> None:
    heard = Heard(CHUNK, [], [(0.5, 2.2), (3.0, 5.0)], [(1.0, 2.0), (3.0, 5.0), (6.0, 7.5)])
    assert heard.certain(1.5, 6.0) == [(1.5, 2.0), (3.0, 5.0)]
    assert heard.certainly_spoken_s(1.5, 7.0) == 3.5
    assert heard.pauses(2.0, 3.0) == [(2.2, 3.0)]
    assert heard.pauses(2.3, 9.0) == []


def test_where_nobody_may_speak_for_two_fifths_of_a_second_is_a_pause_for_words() -> None:
    chunk = Chunk(0, 20 * SAMPLE_RATE, silence(10.0))
    result = ChunkResult(
        (1,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop", (0.0, 9.0), pauses_s=((1.0, 1.1), (3.0, 5.5))
    )
    heard = Heard(chunk, [chunk], [(22.0, 23.0), (25.0, 28.0), (28.7, 29.0)])
    found = heard.with_silences(result, chunk).pauses_s
    assert np.array(found) == pytest.approx(np.array([(0.0, 1.8), (3.0, 5.5), (9.2, 10.0)]))
    assert Heard(chunk, [chunk]).with_silences(result, chunk) == result, "nobody has listened"
    untimed = msgspec.structs.replace(result, token_times_s=())
    assert heard.with_silences(untimed, chunk) == untimed
