"""Tokens, prompt and the figures that the ladder goes by: those of openai-whisper's own decoder."""

from __future__ import annotations

import importlib
import math
from typing import Any

import msgspec
import pytest
import torch

from asr_server.core import TEMPERATURE_LADDER, DecodingOptions
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, transcribe
from harness.openai_whisper import load_openai_whisper

MAX_TOKENS = 16
LOOP_TOKENS = 120
CLIPS = [make_clip(40 + i, duration_s) for i, duration_s in enumerate((30, 3, 12))]
PROMPT = tuple(range(1000, 1300))  # longer than what counts of it


@pytest.fixture(scope="module")
def theirs(pocket: Checkpoint) -> Any:
    return load_openai_whisper(pocket.directory)


@pytest.mark.parametrize(
    ("task", "prompt"), [("transcribe", PROMPT), pytest.param("translate", (), marks=pytest.mark.trial)]
)
def test_one_window_is_read_as_openai_whisper_reads_it(
    pocket: Checkpoint, theirs: Any, task: Any, prompt: tuple[int, ...]
) -> None:
    import whisper

    mels = [whisper.log_mel_spectrogram(clip, padding=whisper.audio.N_SAMPLES) for clip in CLIPS]
    asked = whisper.DecodingOptions(
        task=task,
        language="de",
        temperature=0.0,
        sample_len=MAX_TOKENS,
        prompt=list(prompt) or None,
        fp16=False,
    )
    with torch.inference_mode():
        expected = whisper.decode(
            theirs, torch.stack([whisper.pad_or_trim(mel, whisper.audio.N_FRAMES) for mel in mels]), asked
        )
    options = DecodingOptions(task=task, language="de", prompt_tokens=prompt, max_new_tokens=MAX_TOKENS)
    found = transcribe(pocket.engine(), CLIPS, options)

    def is_text_or_time(token: int) -> bool:
        return pocket.tokenizer.is_text(token) or token >= pocket.tokenizer.specials.timestamp_begin

    assert len({result.tokens for result in found}) > 1, "the audio must matter"
    for ours, other in zip(found, expected, strict=True):
        assert list(ours.tokens) == other.tokens
        assert ours.no_speech_prob == pytest.approx(other.no_speech_prob, rel=1e-3)
        if all(map(is_text_or_time, ours.tokens)):  # special tokens are text there
            assert ours.compression_ratio == pytest.approx(other.compression_ratio, rel=1e-6)
        if ours.finish_reason == "stop":
            assert ours.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-3)


@pytest.mark.trial
def test_a_loop_is_cut_and_read_again_as_openai_whisper_does(pocket: Checkpoint, theirs: Any) -> None:
    """Left to itself, the checkpoint comes to say one token again and again, for as long as it may."""
    import whisper

    transcribe_file = importlib.import_module("whisper.transcribe").transcribe
    asked: dict[str, Any] = {"language": "de", "sample_len": LOOP_TOKENS, "fp16": False}
    mel = whisper.log_mel_spectrogram(CLIPS[1], padding=whisper.audio.N_SAMPLES)
    mel = whisper.pad_or_trim(mel, whisper.audio.N_FRAMES)
    their_loop = whisper.decode(theirs, mel, whisper.DecodingOptions(temperature=0.0, **asked))
    (theirs_again, *_) = transcribe_file(theirs, CLIPS[1], logprob_threshold=None, **asked)["segments"]

    options = DecodingOptions(language="de", max_new_tokens=LOOP_TOKENS, logprob_threshold=-math.inf)
    ladder = msgspec.structs.replace(options, temperatures=TEMPERATURE_LADDER)
    loop, again = (transcribe(pocket.engine(), CLIPS[1:2], each)[0] for each in (options, ladder))
    assert list(loop.tokens) == their_loop.tokens
    assert min(loop.compression_ratio, their_loop.compression_ratio) > ladder.compression_ratio_threshold
    for temperature, ratio in (
        (again.temperature, again.compression_ratio),
        (theirs_again["temperature"], theirs_again["compression_ratio"]),
    ):
        assert temperature > 0
        assert ratio <= ladder.compression_ratio_threshold
