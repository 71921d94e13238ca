"""Where chunks around speech begin and end, to the sample, on frames made up."""

from __future__ import annotations

import pytest

from asr_server.audio.voice import FRAME
from asr_server.core import SAMPLE_RATE, Chunk, VoiceChunking
from tests.audio.test_split_voice import WINDOW, scripted_pieces


def spans(
    *speech: tuple[int, int], padding_ms: int = 320, silence_ms: int = 480, duration_s: float = 20.0
) -> list[tuple[str, int, int]]:
    """Kind, start and length of each piece; the speech is given by its first frame and the one behind."""
    probabilities = [0.0] * 700
    for first, end in speech:
        probabilities[first:end] = [1.0] * (end - first)
    pieces = scripted_pieces(probabilities, VoiceChunking(0.5, padding_ms, silence_ms), duration_s)
    return [
        ("chunk", piece.start_sample, len(piece.samples))
        if isinstance(piece, Chunk)
        else ("silence", piece.start_sample, piece.num_samples)
        for piece in pieces
    ]


def chunks(*speech: tuple[int, int], padding_ms: int = 320, silence_ms: int = 480) -> list[tuple[int, int]]:
    """Where each chunk begins and ends."""
    found = spans(*speech, padding_ms=padding_ms, silence_ms=silence_ms)
    return [(start, start + length) for kind, start, length in found if kind == "chunk"]


def test_pieces_tile_the_file_around_speech() -> None:
    start, end = 100 * FRAME - 5120, 150 * FRAME + 7680
    assert spans((100, 150)) == [
        ("silence", 0, start),
        ("chunk", start, end - start),
        ("silence", end, 20 * SAMPLE_RATE - end),
    ]
    assert spans(duration_s=3.0) == [("silence", 0, 3 * SAMPLE_RATE)]
    assert spans((3, 20), duration_s=0.7) == [("chunk", 0, 11_200)], "neither padding nor silence beyond it"


@pytest.mark.parametrize(("gap", "num_chunks"), [(14, 1), (15, 2)])
def test_speech_goes_on_over_less_than_the_silence_that_ends_a_chunk(gap: int, num_chunks: int) -> None:
    """480 ms are fifteen frames."""
    found = chunks((100, 150), (150 + gap, 200))
    assert len(found) == num_chunks
    assert (found[0][0], found[-1][1]) == (100 * FRAME - 5120, 200 * FRAME + 7680)


@pytest.mark.parametrize(("padding_ms", "end"), [(320, 5120), (100, 7680), (500, 5120), (170, 7520)])
def test_between_two_chunks_the_silence_is_the_firsts_but_for_the_padding_of_the_next(
    padding_ms: int, end: int
) -> None:
    """Twenty frames lie between both, of which the first gets half in any case."""
    first, second = chunks((100, 150), (170, 200), padding_ms=padding_ms)
    assert first[1] == 150 * FRAME + end
    assert second == (max(first[1], 170 * FRAME - 16 * padding_ms), 200 * FRAME + 7680)


def test_the_padding_is_half_of_the_longest_chunk_at_most() -> None:
    ((start, _),) = chunks((300, 320), padding_ms=10_000)
    assert start == 300 * FRAME - WINDOW // 2


def test_speech_longer_than_a_chunk_is_cut_within_its_second_half() -> None:
    first, second = chunks((0, 300))
    assert first[0] == 0
    assert second == (first[1], 300 * FRAME + 7680)
    assert WINDOW // 2 <= first[1] <= WINDOW
    assert chunks((0, 235)) == [(0, WINDOW)], "with its silence it fills the chunk"
    ((_, end),) = chunks((0, 236))
    assert 236 * FRAME <= end < WINDOW, "of more the silence is cut"
