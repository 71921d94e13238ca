"""Recordings longer than the window, from samples to segments: what transformers makes of the same chunks."""

import asyncio
from pathlib import Path

import pytest

from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import DecodingOptions, Samples
from asr_server.transcription.progress import PreviousText
from harness.clips import make_clip
from harness.engine_helpers import Reference
from tests.support.checkpoints import terse_directory
from tests.unit.transcription.pipeline import chunks_of, transcribe
from tests.unit.transcription.transformers_reading import Parts, read_chunks


@pytest.mark.parametrize("window_s", [8, pytest.param(30, marks=pytest.mark.trial)])
def test_a_long_recording_gives_transformers_segments_chunk_by_chunk(
    window_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreviousText, "add", lambda *_: None)  # there the tail of a chunk has no prompt
    checkpoint = terse_directory(window_s)
    window = read_window(checkpoint)
    sound = make_clip(3, 2.6 * window.duration_s)
    options = DecodingOptions(language="de")
    segments = asyncio.run(transcribe(checkpoint, sound, options)).segments
    found: Parts = {}
    for segment in segments:
        found[segment.seek] = found.get(segment.seek, ()) + segment.tokens
    expected = read_by_transformers(checkpoint, sound)
    assert len(expected) > 4, "some tails must have been left unread"
    assert found == expected


def read_by_transformers(checkpoint: Path, sound: Samples) -> Parts:
    reference, tokenizer = Reference(checkpoint), Tokenizer.from_directory(checkpoint)
    return read_chunks(reference, tokenizer, chunks_of(checkpoint, sound), "de")
