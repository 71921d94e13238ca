"""Recordings of several windows, as openai-whisper's `transcribe` and transformers read them."""

import asyncio
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_server.audio import split
from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import SAMPLE_RATE, Chunk, DecodingOptions, Samples
from asr_server.transcription.progress import PreviousText
from harness.clips import make_clip
from harness.engine_helpers import Reference
from harness.openai_whisper import load_openai_whisper
from tests.support.checkpoints import brief_directory, terse_directory
from tests.unit.transcription.pipeline import chunks_of, transcribe
from tests.unit.transcription.transformers_reading import Parts, read_chunks

FRAME = SAMPLE_RATE // 100  # openai-whisper's windows begin with one
DURATION_S = 88.0
SEED = 1


@pytest.mark.parametrize("condition_on_previous_text", [pytest.param(False, marks=pytest.mark.trial), True])
def test_a_long_recording_is_read_as_openai_whisper_reads_it(
    monkeypatch: pytest.MonkeyPatch, condition_on_previous_text: bool
) -> None:
    """Its `clip_timestamps` are our cuts. In this recording no text goes on where its window ends: that is
    kept here and dropped there (docs/exactness.md), so that later prompts would differ. The tail of a chunk
    has no prompt there. Without prompts the next test has transformers' reading.
    """
    if not condition_on_previous_text:
        monkeypatch.setattr(PreviousText, "add", lambda *_: None)
    sound = make_clip(SEED, DURATION_S)
    cut = split.best_cut
    monkeypatch.setattr(split, "best_cut", lambda levels: cut(levels) // FRAME * FRAME)
    checkpoint = brief_directory()
    options = DecodingOptions(language="de", condition_on_previous_text=condition_on_previous_text)
    found = asyncio.run(transcribe(checkpoint, sound, options)).segments
    chunks = chunks_of(checkpoint, sound)
    expected = read_by_openai_whisper(
        monkeypatch, load_openai_whisper(checkpoint), sound, chunks, condition_on_previous_text
    )
    beginnings = {chunk.start_sample // FRAME for chunk in chunks}
    assert {segment["seek"] for segment in expected} - beginnings, "some tails must have been left unread"
    assert [(s.seek, s.tokens) for s in found] == [(s["seek"], tuple(s["tokens"])) for s in expected]
    ends_s = [chunk.start_s + chunk.duration_s for chunk in chunks]
    for ours, theirs in zip(found, expected, strict=True):
        end_s = next(end_s for end_s in ends_s if theirs["seek"] < 100 * end_s)
        times_s = [min(theirs[side], end_s) for side in ("start", "end")]  # a chunk has no times beyond it
        assert [ours.start_s, ours.end_s] == pytest.approx(times_s)
        assert ours.avg_logprob == pytest.approx(theirs["avg_logprob"], abs=1e-3)
        assert ours.no_speech_prob == pytest.approx(theirs["no_speech_prob"], rel=1e-3)


def read_by_openai_whisper(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    sound: Samples,
    chunks: list[Chunk],
    condition_on_previous_text: bool,
) -> list[dict[str, Any]]:
    """The segments that have text."""
    import whisper.transcribe  # noqa: F401  the module, which a function of that name hides

    module: Any = sys.modules["whisper.transcribe"]
    give_each_window_its_own_features(monkeypatch, module, sound)
    answer = module.transcribe(
        model,
        sound,
        language="de",
        temperature=0.0,
        condition_on_previous_text=condition_on_previous_text,
        clip_timestamps=[*chain.from_iterable((c.start_s, c.start_s + c.duration_s) for c in chunks)],
        sample_len=model.dims.n_text_ctx,
        fp16=False,
    )
    return [segment for segment in answer["segments"] if segment["tokens"]]


def give_each_window_its_own_features(monkeypatch: pytest.MonkeyPatch, module: Any, sound: Samples) -> None:
    """openai-whisper transforms the whole file at once, and the loudest place of the file decides how faint
    sounds may be; a server has not the whole file when it reads the first window. So `transcribe` is given
    frame numbers for features, and each window's are made of its own samples.
    """
    log_mel_spectrogram, pad_or_trim = module.log_mel_spectrogram, module.pad_or_trim

    def frame_numbers(samples: Samples, num_mels: int, padding: int) -> torch.Tensor:
        return torch.arange((len(samples) + padding) // FRAME)[None]

    def features(frames: torch.Tensor, length: int) -> torch.Tensor:
        first, end = int(frames[0, 0]), int(frames[0, -1]) + 1
        samples = sound[first * FRAME : end * FRAME]
        mel: torch.Tensor = pad_or_trim(log_mel_spectrogram(samples, padding=length * FRAME), length)
        return mel

    monkeypatch.setattr(module, "log_mel_spectrogram", frame_numbers)
    monkeypatch.setattr(module, "pad_or_trim", features)


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
