"""Token times against those of openai/whisper and transformers, of the same tokens in the same audio."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult, DecodingOptions, Samples
from asr_server.engine import alignment
from asr_server.engine.alignment import first_frames
from harness.engine_helpers import Checkpoint, Reference, transcribe
from harness.openai_whisper import load_openai_whisper, token_times_s
from tests.support.checkpoints import (
    english_only_directory,
    large_directory,
    pocket_directory,
    tiny_directory,
)
from tests.support.speech import say
from tests.unit.engine.test_alignment import NEAR_S, WORDS, clips


@pytest.fixture
def plain_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """openai/whisper's path, on which tokens may share a position."""
    monkeypatch.setattr(alignment, "first_frames", partial(first_frames, share_frames=True))


def offs_s(
    checkpoint: Checkpoint, some: Sequence[Samples], found: Sequence[ChunkResult], language: str | None
) -> list[float]:
    """How far each token's time lies from openai/whisper's."""
    reference = load_openai_whisper(checkpoint.directory)
    offs: list[float] = []
    for clip, result in zip(some, found, strict=True):
        expected = token_times_s(reference, checkpoint.tokenizer, clip, result.tokens, language)
        offs += np.abs(np.array(expected) - np.array(result.token_times_s)).tolist()
    return offs


@pytest.mark.usefixtures("plain_method")
@pytest.mark.parametrize(
    ("directory", "language"),
    [
        pytest.param(tiny_directory, "de", marks=pytest.mark.trial),
        pytest.param(large_directory, "de", marks=pytest.mark.trial),
        pytest.param(english_only_directory, None, marks=pytest.mark.trial),
    ],
)
def test_token_times_are_those_of_openai_whisper(directory: Callable[[], Path], language: str | None) -> None:
    # Not 30 s for large: the last log-mel frame is transformers' there, and random weights enlarge it.
    checkpoint, some = Checkpoint.load(directory()), clips()[directory is large_directory :]
    options = DecodingOptions(language="de", word_timestamps=True, max_new_tokens=44)  # text and nothing else
    found = transcribe(checkpoint.engine(), some, options)
    assert len({result.token_times_s for result in found}) == len(some), "the audio must matter"
    offs = offs_s(checkpoint, some, found, language)
    assert len(offs) > 100, "or one off is more than a hundredth"
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99


@pytest.mark.usefixtures("plain_method")
def test_the_embedded_models_token_times_are_those_of_openai_whisper(embedded: Checkpoint) -> None:
    some = [say(digits).samples for digits in ("1", "427", "90817263", "55", "3141592")]
    options = DecodingOptions(language="en", word_timestamps=True)
    offs = offs_s(embedded, some, transcribe(embedded.engine(), some, options), "en")
    assert len(offs) > 20
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99


@pytest.mark.usefixtures("plain_method")
def test_the_embedded_models_token_times_are_transformers_on_the_same_rows(embedded: Checkpoint) -> None:
    """Its features, network, median filter and dynamic time warping; benchmarks/results/word-times.md says
    what it does with attention in between.
    """
    some = [say(digits).samples for digits in ("1", "427", "90817", "55", "31415")]
    options = DecodingOptions(language="en", word_timestamps=True)
    found = transcribe(embedded.engine(), some, options)
    reference = Reference(embedded.directory)
    reference.model.set_attn_implementation("eager")
    offs: list[float] = []
    for clip, result in zip(some, found, strict=True):
        expected = _times_of_transformers(reference, embedded.tokenizer, clip, result.tokens)
        offs += np.abs(np.array(expected) - np.array(result.token_times_s)).tolist()
    assert len(offs) > 15
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99


def _times_of_transformers(
    reference: Reference, tokenizer: Tokenizer, samples: Samples, tokens: Sequence[int]
) -> list[float]:
    from transformers.models.whisper import generation_whisper

    specials = tokenizer.specials
    prompt = [specials.start_of_transcript, specials.languages["en"], specials.transcribe]
    text = [token for token in tokens if tokenizer.is_text(token)]
    fed = torch.tensor([[*prompt, specials.no_timestamps, *text, specials.end_of_text]])
    with torch.inference_mode():
        attention = reference.model(
            input_features=reference.features([samples]), decoder_input_ids=fed, output_attentions=True
        ).cross_attentions
    heads = reference.model.generation_config.alignment_heads
    weights = torch.stack([attention[layer][0, head] for layer, head in heads])[..., : len(samples) // 320]
    weights /= weights.sum(-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    smoothed = generation_whisper._median_filter((weights - mean) / std, 7).mean(0)[len(prompt) : -1]
    rows, frames = generation_whisper._dynamic_time_warping(-smoothed.double().numpy())
    return [float(frames[np.argmax(rows == row)]) * 0.02 for row in range(len(text) + 1)]


def with_heads(target: Path, heads: list[list[int]]) -> Path:
    shutil.copytree(pocket_directory(), target)
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(config | {"alignment_heads": heads}))
    return target


@pytest.mark.usefixtures("plain_method")
def test_alignment_heads_are_the_checkpoints_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(with_heads(tmp_path / "own", [[1, 1], [0, 1]]))
    assert checkpoint.model.alignment_heads == {0: [1], 1: [1]}
    some = clips()[1:3]
    offs = offs_s(checkpoint, some, transcribe(checkpoint.engine(), some, WORDS), "de")
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99
