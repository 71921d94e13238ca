"""`--short-audio tail`: a chunk is encoded without the silence behind it, which is encoded once for all."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from asr_server.audio.split import Splitter
from asr_server.checkpoint.sizes import short_audio_mode
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, submit, transcribe
from harness.speech import synthesis, word_errors
from tests.support.real_weights import real_checkpoint
from tests.unit.engine.device_stand_ins import EncoderOfCopies

DURATIONS_S = (3, 14, 0.5, 4.9, 29, 9.7)
CLIPS = [make_clip(i, duration_s) for i, duration_s in enumerate(DURATIONS_S)]
OPTIONS = DecodingOptions(language="de", max_new_tokens=15)
TAIL: dict[str, Any] = {"short_audio": "tail"}


@torch.inference_mode()
def test_of_silence_it_makes_nearly_what_the_whole_window_makes(pocket: Checkpoint) -> None:
    model = pocket.model
    silence, mel = model.encode_silence(), model.log_mel([np.zeros(16_000, np.float32)])
    found = model.encoder(mel[..., :400], silence=silence)
    torch.testing.assert_close(found, model.encoder(mel)[:, :200], atol=2e-3, rtol=2e-3)


@pytest.fixture(scope="module")
def alone(pocket: Checkpoint) -> list[ChunkResult]:
    """Each clip decoded by itself."""
    return [transcribe(pocket.engine(num_slots=1, **TAIL), [clip], OPTIONS)[0] for clip in CLIPS]


@pytest.mark.parametrize(("num_slots", "lookahead"), [(16, False), (3, True)])
def test_chunks_of_all_lengths_together_are_read_as_alone(
    pocket: Checkpoint, alone: list[ChunkResult], num_slots: int, lookahead: bool
) -> None:
    """Slots are fewer than chunks, so that long ones follow short ones in a slot and are moved."""
    engine = pocket.engine(num_slots=num_slots, lookahead=lookahead, **TAIL)
    found = transcribe(engine, CLIPS, OPTIONS)
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    assert len({result.tokens for result in found}) > 1


def test_a_chunk_that_fits_into_no_workers_window_is_encoded_with_the_next_ones(pocket: Checkpoint) -> None:
    """Else one of two workers would wait while the other encodes a third chunk."""
    engine = pocket.engine(num_slots=8, compute_workers=2, **TAIL)
    for i, duration_s in enumerate((14, 14, 14, 2, 2)):
        submit(engine, str(i), make_clip(i, duration_s), OPTIONS)
    in_use = []
    for _ in range(2):
        engine.step()
        in_use.append(engine.slots_in_use)
    assert in_use == [2, 5]


def test_a_slot_s_own_copy_of_the_silence_serves_as_well_as_the_shared_one(
    pocket: Checkpoint, alone: list[ChunkResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are what a GPU's kernels read; here torch's products read them."""
    monkeypatch.setattr("asr_server.engine.encoding.CpuEncoder", EncoderOfCopies)
    found = transcribe(pocket.engine(num_slots=4, **TAIL), CLIPS, OPTIONS)
    for result, expected in zip(found, alone, strict=True):
        assert result.tokens == expected.tokens
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_no_segment_begins_where_the_audio_has_ended(pocket: Checkpoint) -> None:
    """In whole windows a published model has such segments, and says its last sentence again there."""
    first_time = pocket.tokenizer.specials.timestamp_begin

    def starts_behind(mode: str) -> int:
        options = DecodingOptions(language="de", max_new_tokens=60)
        found = transcribe(pocket.engine(short_audio=mode), CLIPS[:3], options)
        return sum(
            before >= first_time and token >= first_time + 50 * duration_s
            for duration_s, result in zip(DURATIONS_S, found, strict=False)
            for before, token in pairwise(result.tokens)
        )

    assert starts_behind("exact") > 0
    assert starts_behind("tail") == 0


def test_words_are_aligned_to_audio_of_fewer_positions(pocket: Checkpoint) -> None:
    asked = DecodingOptions(language="de", max_new_tokens=15, word_timestamps=True)
    for duration_s, result in zip(DURATIONS_S, transcribe(pocket.engine(**TAIL), CLIPS, asked), strict=True):
        assert len(result.token_times_s) > 1
        assert 0 <= min(result.token_times_s) <= max(result.token_times_s) <= duration_s


def test_who_asks_for_float32_gets_whole_windows_and_anybody_may_choose() -> None:
    assert short_audio_mode(Settings().short_audio, Settings().dtype) == "tail"
    assert short_audio_mode("auto", "float32") == "exact"
    assert [short_audio_mode(mode, "float32") for mode in ("tail", "exact")] == ["tail", "exact"]


@pytest.mark.trial
def test_the_last_of_several_sentences_is_not_said_twice() -> None:
    """With real weights: half a second of silence, encoded with chunks of 10 to 15 s, was too little."""
    readings = synthesis.readings(1, 100)
    if not readings:
        pytest.skip("no voice is installed")
    checkpoint = Checkpoint.load(real_checkpoint("base"))
    splitter, samples = Splitter(15 * SAMPLE_RATE), readings[0].samples()
    chunks = [each for each in splitter.push(samples) + splitter.finish() if isinstance(each, Chunk)]
    engine = checkpoint.engine(**TAIL)
    results = transcribe(engine, [chunk.samples for chunk in chunks], DecodingOptions(language="en"))
    tokens = [token for result in results for token in result.tokens if checkpoint.tokenizer.is_text(token)]
    errors = word_errors(readings[0].text or "", checkpoint.tokenizer.decode(tokens), "en")
    assert errors.insertions <= 4
