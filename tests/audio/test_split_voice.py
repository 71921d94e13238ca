"""Chunks that begin and end with speech."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.audio.split import VoiceSplitter
from asr_server.audio.voice import FRAME, Probabilities, VoiceDetector
from asr_server.core import SAMPLE_RATE, Chunk, Piece, Samples, VoiceChunking
from tests.audio.audio_files import pieces_by
from tests.noises import make_noise
from tests.speech import Spoken, say

WINDOW = 8 * SAMPLE_RATE
TURNS = say("12345", gap_s=[0.1, 0.1, 3.0, 0.1, 9.0])  # "one two three", a pause, "four five", silence


def split(samples: Samples, chunking: VoiceChunking, block: int = 20_000) -> list[Piece]:
    return pieces_by(VoiceSplitter(WINDOW, chunking), samples, block)


def spans_s(pieces: list[Piece]) -> list[tuple[float, float]]:
    chunks = [piece for piece in pieces if isinstance(piece, Chunk)]
    return [(chunk.start_s, chunk.start_s + chunk.duration_s) for chunk in chunks]


def words_in(span: tuple[float, float], talk: Spoken) -> int:
    return sum(span[0] <= start and end <= span[1] for start, end in talk.times)


def test_a_chunk_begins_and_ends_with_speech() -> None:
    first, second = spans_s(split(TURNS.samples, VoiceChunking(0.5, 300, 500)))
    assert (words_in(first, TURNS), words_in(second, TURNS)) == (3, 2)
    assert second[0] == pytest.approx(TURNS.times[3][0] - 0.3, abs=0.1)
    assert second[1] == pytest.approx(TURNS.times[4][1] + 0.5, abs=0.15)


def test_the_padding_says_how_much_is_kept_before_speech() -> None:
    starts = [spans_s(split(TURNS.samples, VoiceChunking(0.5, ms, 500)))[1][0] for ms in (0, 300, 1000)]
    assert starts[0] - starts[1] == pytest.approx(0.3)
    assert starts[0] - starts[2] == pytest.approx(1.0)


@pytest.mark.parametrize(("silence_ms", "num_chunks"), [(500, 2), (4000, 1)])
def test_the_silence_says_which_pauses_end_a_chunk(silence_ms: int, num_chunks: int) -> None:
    assert len(spans_s(split(TURNS.samples, VoiceChunking(0.5, 0, silence_ms)))) == num_chunks


def test_the_threshold_says_what_counts_as_speech() -> None:
    durations = [
        sum(end - start for start, end in spans_s(split(TURNS.samples, VoiceChunking(threshold, 0, 100))))
        for threshold in (0.05, 0.5, 0.98)
    ]
    assert durations[0] > durations[1] > durations[2]
    assert spans_s(split(TURNS.samples, VoiceChunking(1.0, 0, 100))) == []


def test_speech_longer_than_a_window_loses_nothing() -> None:
    talk = say("0123456789" * 3, gap_s=0.15)
    spans = spans_s(split(talk.samples, VoiceChunking(0.5, 300, 500)))
    assert all(end - start <= 8.0 for start, end in spans)
    assert sum(words_in(span, talk) for span in spans) == len(talk.digits)


@pytest.mark.parametrize("kind", ["hum", "white", "pink"])
def test_noise_gives_no_chunk(kind: str) -> None:
    assert spans_s(split(make_noise(kind, -30, 20.0), VoiceChunking(0.5, 300, 200))) == []


def test_the_size_of_the_blocks_changes_nothing() -> None:
    talk = np.concatenate([TURNS.samples, make_noise("pink", -30, 5.0), TURNS.samples])
    found = [spans_s(split(talk, VoiceChunking(0.5, 300, 200), block)) for block in (333, 20_000, 10**6)]
    assert found[0] == found[1] == found[2]


class ScriptedDetector(VoiceDetector):
    """Gives each frame the probability from a list, then 0."""

    def __init__(self, probabilities: list[float]) -> None:
        self.probabilities, self.num_samples = np.array(probabilities, np.float32), 0

    def push(self, samples: Samples) -> Probabilities:
        first, self.num_samples = self.num_samples // FRAME, self.num_samples + len(samples)
        found = np.zeros(self.num_samples // FRAME - first, np.float32)
        scripted = self.probabilities[first:][: len(found)]
        found[: len(scripted)] = scripted
        return found

    def finish(self) -> Probabilities:
        return np.empty(0, np.float32)


def scripted_pieces(probabilities: list[float], chunking: VoiceChunking, duration_s: float) -> list[Piece]:
    splitter = VoiceSplitter(WINDOW, chunking)
    splitter._detector = ScriptedDetector(probabilities)
    return pieces_by(splitter, np.zeros(round(duration_s * SAMPLE_RATE), np.float32), 20_000)


@pytest.mark.parametrize(("before", "last", "num_frames"), [(0.1, 0.6, 41), (0.6, 0.6, 42), (0.6, 0.1, 1)])
def test_the_last_frame_of_a_buffer_decides_whether_speech_goes_on_in_the_next(
    before: float, last: float, num_frames: int
) -> None:
    """The detector scores a buffer at a time; speech goes on at a little less than what starts it."""
    num_scored = (WINDOW + WINDOW // 3) // FRAME
    probabilities = [0.1] * (num_scored - 2) + [before, last] + [0.4] * 40
    pieces = scripted_pieces(probabilities, VoiceChunking(0.5, 0, 500), 20.0)
    (chunk,) = (piece for piece in pieces if isinstance(piece, Chunk))
    assert len(chunk.samples) == num_frames * FRAME + SAMPLE_RATE // 2
    assert chunk.start_sample == (num_scored - 2 + (before < 0.5)) * FRAME
