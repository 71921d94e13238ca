"""Where a cut lies and how long a silence is, to the hop of five milliseconds."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.audio.split import MARGIN, MIN_REST, MIN_SILENCE, Splitter, quietest_cut
from asr_server.core import SAMPLE_RATE, Chunk, Samples, Silence
from asr_server.levels import HOP, HOPS_PER_LEVEL
from tests.audio.audio_files import pieces_by

WINDOW = 30 * SAMPLE_RATE
# A level is of the hops that follow: sound is seen so long before it begins, and taken to end so much later.
SEEN = (HOPS_PER_LEVEL - 1) * HOP


def hiss(num_samples: int) -> Samples:
    return np.random.default_rng(0).normal(0, 0.1, num_samples).astype(np.float32)


def spans(*parts: Samples, max_chunk: int = WINDOW) -> list[tuple[str, int, int]]:
    """What the parts are cut into: kind, start and length."""
    pieces = pieces_by(Splitter(max_chunk), np.concatenate(parts), 10_000)
    return [
        ("chunk", piece.start_sample, len(piece.samples))
        if isinstance(piece, Chunk)
        else ("silence", piece.start_sample, piece.num_samples)
        for piece in pieces
    ]


def nothing(num_samples: int) -> Samples:
    return np.zeros(num_samples, np.float32)


def test_a_second_of_silence_before_sound_is_left_out_but_for_a_quarter() -> None:
    sound = hiss(2 * SAMPLE_RATE)
    lead = MIN_SILENCE + SEEN
    assert spans(nothing(lead), sound) == [
        ("silence", 0, MIN_SILENCE - MARGIN),
        ("chunk", MIN_SILENCE - MARGIN, len(sound) + MARGIN + SEEN),
    ]
    assert spans(nothing(lead - HOP), sound) == [("chunk", 0, lead - HOP + len(sound))]


def test_a_second_of_silence_behind_sound_is_left_out_but_for_a_quarter() -> None:
    sound = hiss(2 * SAMPLE_RATE)
    rest = MIN_SILENCE + SEEN
    kept = len(sound) + SEEN + MARGIN
    assert spans(sound, nothing(rest)) == [("chunk", 0, kept), ("silence", kept, len(sound) + rest - kept)]
    assert spans(sound, nothing(rest - 1)) == [("chunk", 0, len(sound) + rest - 1)]


def test_chunks_are_three_seconds_at_least_and_leave_ten_or_a_third() -> None:
    assert spans(hiss(3 * SAMPLE_RATE), max_chunk=100) == [("chunk", 0, 3 * SAMPLE_RATE)]
    assert len(spans(hiss(3 * SAMPLE_RATE + 1), max_chunk=100)) == 2
    splitter = Splitter(60 * SAMPLE_RATE)
    splitter.push(hiss(60 * SAMPLE_RATE + MIN_REST))
    assert splitter.num_chunks == 0
    splitter.push(hiss(1))
    assert splitter.num_chunks == 1
    assert MIN_REST == 10 * SAMPLE_RATE


def test_a_splitter_knows_what_it_holds_and_what_is_settled() -> None:
    splitter = Splitter(WINDOW)
    told = splitter.push(np.concatenate([nothing(15 * SAMPLE_RATE), hiss(26 * SAMPLE_RATE)]))
    assert told == [], "a silence is told with the chunk behind it"
    assert splitter.num_settled == 15 * SAMPLE_RATE - SEEN - MARGIN
    assert splitter.num_samples == 41 * SAMPLE_RATE
    assert splitter.held_bytes == 4 * (splitter.num_samples - splitter.num_settled)
    first, second = splitter.finish()
    assert isinstance(first, Silence)
    assert isinstance(second, Chunk)
    assert (first.num_samples, second.start_sample) == (second.start_sample, 15 * SAMPLE_RATE - SEEN - MARGIN)
    assert splitter.num_settled == splitter.num_samples
    assert splitter.held_bytes == 0


# -- The quietest place -------------------------------------------------------------------------------------


def levels(*pauses: tuple[int, int, float], loud_db: float = -20.0, num_hops: int = 6000) -> Samples:
    """Powers of steady sound but for pauses: first hop, their number, level."""
    decibels = np.full(num_hops, loud_db)
    for first, length, level_db in pauses:
        decibels[first : first + length] = level_db
    return (10 ** (decibels / 10)).astype(np.float32)


def cut_hop(*pauses: tuple[int, int, float], **more: float) -> float:
    return (quietest_cut(levels(*pauses, **more)) - HOPS_PER_LEVEL * HOP // 2) / HOP  # type: ignore[arg-type]


def test_a_cut_lies_in_the_last_fifth_of_a_second_of_its_pause() -> None:
    """The pause ends where 200 ms are 8 dB louder: with five of the sound's hops."""
    assert cut_hop((4500, 140, -80.0)) == 4500 + 140 - 35 + 18
    assert cut_hop((5000, 300, -80.0)) == 5000 + 300 - 35 + 18
    assert cut_hop((4000, 140, -80.0), num_hops=5000) == 4000 + 140 - 35 + 18


@pytest.mark.parametrize(("length", "is_taken"), [(85, True), (84, False)])
def test_a_later_pause_is_taken_if_it_is_half_as_long(length: int, is_taken: bool) -> None:
    """Of 140 hops 111 places are quiet; of 85, 56."""
    found = cut_hop((4500, 140, -80.0), (5500, length, -80.0))
    assert found == (5500 + length - 17 if is_taken else 4500 + 140 - 17)


def test_only_eight_seconds_before_the_end_or_half_of_it_are_looked_at() -> None:
    later = 5500, 130, -80.0
    assert cut_hop((4000, 400, -80.0), later) == 5500 + 130 - 17
    assert cut_hop((4400, 400, -80.0), later) == 4400 + 400 - 17
    assert cut_hop((600, 400, -80.0), (1500, 130, -80.0), num_hops=2000) == 1500 + 130 - 17
    assert cut_hop((1000, 250, -80.0), (1500, 130, -80.0), num_hops=2000) == 1000 + 250 - 17


def test_how_quiet_a_pause_is_depends_on_the_sound() -> None:
    """Where the quietest place lies 10 dB below the sound, another may be 2 dB louder."""
    for second_db, is_taken in ((-28.2, True), (-27.8, False)):
        assert (cut_hop((4500, 200, -30.0), (5200, 200, second_db)) > 5000) == is_taken
    for second_db, is_taken in ((-22.1, True), (-21.9, False)):  # of 3 dB, 1
        assert (cut_hop((4500, 200, -23.0), (5200, 200, second_db)) > 5000) == is_taken
    for second_db, is_taken in ((-72.2, True), (-71.8, False)):  # of 60, 8
        assert (cut_hop((4500, 200, -80.0), (5200, 200, second_db)) > 5000) == is_taken


def test_one_short_pause_alone_is_found() -> None:
    """It is less than the share of places that are taken to be quiet."""
    assert 5000 < cut_hop((5000, 60, -80.0)) < 5060


def test_within_a_pause_the_quietest_hops_are_cut_and_a_decibel_is_the_same() -> None:
    assert cut_hop((4500, 140, -70.0), (4620, 3, -80.0)) == 4622
    assert cut_hop((4500, 140, -70.0), (4620, 3, -70.9)) == 4624
    assert cut_hop((4500, 140, -70.0), (4620, 3, -71.1)) == 4622
