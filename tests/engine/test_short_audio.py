"""`--short-audio fast`: a chunk is read as by a checkpoint whose window is no longer than it needs."""

from __future__ import annotations

import pytest

from asr_server.core import DecodingOptions
from benchmarks.clips import make_clip
from benchmarks.engine_helpers import Checkpoint, Reference, transcribe
from tests.checkpoints import cut_to, pocket_directory

DURATIONS_S = (3, 14, 0.5, 4.9, 29, 9.7, 7, 19.5, 12, 24)
LENGTHS_S = (5, 15, 5, 5, 30, 10, 10, 20, 15, 30)
CLIPS = [make_clip(i, duration_s) for i, duration_s in enumerate(DURATIONS_S)]
MAX_TOKENS = 15


OPTIONS = DecodingOptions(language="de", max_new_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Reference]:
    folder = tmp_path_factory.mktemp("cut")
    return {
        window_s: Reference(cut_to(pocket_directory(), window_s, folder / str(window_s)))
        for window_s in set(LENGTHS_S)
    }


@pytest.fixture(scope="module")
def expected(references: dict[int, Reference]) -> list[tuple[int, ...]]:
    """What transformers hears in each clip."""
    return [
        references[length_s].transcribe([clip], "de", MAX_TOKENS)[0]
        for clip, length_s in zip(CLIPS, LENGTHS_S, strict=True)
    ]


@pytest.mark.parametrize(("num_slots", "lookahead"), [(16, False), (3, False), (4, True)])
def test_chunks_of_all_lengths_together_are_read_as_in_windows_of_their_own(
    pocket: Checkpoint, expected: list[tuple[int, ...]], num_slots: int, lookahead: bool
) -> None:
    """Slots are fewer than chunks, so that long ones follow short ones in a slot and are moved."""
    engine = pocket.engine(short_audio="fast", num_slots=num_slots, lookahead=lookahead)
    found = [result.tokens for result in transcribe(engine, CLIPS, OPTIONS)]
    assert found == expected


def test_exact_pads_to_the_window(pocket: Checkpoint, references: dict[int, Reference]) -> None:
    exact = [result.tokens for result in transcribe(pocket.engine(), CLIPS[:4], OPTIONS)]
    padded = [references[30].transcribe([clip], "de", MAX_TOKENS)[0] for clip in CLIPS[:4]]
    fast = [references[5].transcribe([clip], "de", MAX_TOKENS)[0] for clip in CLIPS[:1]]
    assert exact == padded
    assert exact[:1] != fast, "the padding must matter here"


def test_words_are_aligned_to_audio_of_fewer_positions(pocket: Checkpoint) -> None:
    asked = DecodingOptions(language="de", max_new_tokens=MAX_TOKENS, word_timestamps=True)
    found = transcribe(pocket.engine(short_audio="fast"), CLIPS, asked)
    for duration_s, result in zip(DURATIONS_S, found, strict=True):
        assert len(result.token_times_s) > 1
        assert 0 <= min(result.token_times_s) <= max(result.token_times_s) <= duration_s
