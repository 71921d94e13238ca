"""Recordings longer than the window, from samples to segments: what transformers makes of the same chunks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asr_server.checkpoint import AudioWindow
from asr_server.core import SAMPLE_RATE, DecodingOptions, Samples
from asr_server.tokenizer import Tokenizer
from asr_server.transcription.assembly import MIN_TAIL_S
from asr_server.transcription.chunk_reader import MAX_PARTS
from benchmarks.clips import make_clip
from tests.checkpoints import terse_directory
from tests.engine.engine_helpers import Reference
from tests.transcription.pipeline import chunks_of, transcribe

FRAMES_PER_S = 100
PROMPT_TOKENS = 3


Parts = dict[int, tuple[int, ...]]  # where the audio begins that was read, as `seek`: the tokens kept of it


@pytest.mark.parametrize("window_s", [8, 30])
def test_a_long_recording_gives_transformers_segments_chunk_by_chunk(window_s: int) -> None:
    checkpoint = terse_directory(window_s)
    window = AudioWindow.from_directory(checkpoint)
    sound = make_clip(3, 2.6 * window.duration_s)
    options = DecodingOptions(language="de", timestamps=True)
    segments = asyncio.run(transcribe(checkpoint, sound, options)).segments
    found: Parts = {}
    for segment in segments:
        found[segment.seek] = found.get(segment.seek, ()) + segment.tokens
    expected = read_by_transformers(checkpoint, sound)
    assert len(expected) > 4, "some tails must have been left unread"
    assert found == expected


def read_by_transformers(checkpoint: Path, sound: Samples) -> Parts:
    parts: Parts = {}
    reference, tokenizer = Reference(checkpoint), Tokenizer.from_directory(checkpoint)
    num_positions = reference.model.config.max_target_positions
    for chunk in chunks_of(checkpoint, sound):
        samples, start = chunk.samples, chunk.start_sample
        for part in range(MAX_PARTS):
            (tokens,) = reference.transcribe([samples], "de", True, num_positions - PROMPT_TOKENS)
            closed, offset_s = retrieve(reference, tokens, len(samples), tokenizer)
            rest = samples[round(offset_s * SAMPLE_RATE) :]
            is_read = len(rest) < MIN_TAIL_S * SAMPLE_RATE or part == MAX_PARTS - 1
            kept = tokens if is_read else closed
            if min(kept[-2:]) >= tokenizer.specials.timestamp_begin:
                kept = kept[:-1]  # it opens a segment without text
            parts[round(start / SAMPLE_RATE * FRAMES_PER_S)] = kept
            if is_read:
                break
            samples, start = rest, start + len(samples) - len(rest)
    return parts


def retrieve(
    reference: Reference, tokens: tuple[int, ...], num_samples: int, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], float]:
    """transformers' own reading of the timestamps: the tokens of closed segments, and where to go on, in
    seconds.
    """
    num_frames = num_samples * FRAMES_PER_S // SAMPLE_RATE
    segments, offset = reference.model._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[None],
        time_offset=[0.0],
        timestamp_begin=tokenizer.specials.timestamp_begin,
        seek_num_frames=[num_frames],
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 0),
    )
    closed = tuple(token for segment in segments for token in segment["tokens"].tolist())
    return closed, offset / FRAMES_PER_S
