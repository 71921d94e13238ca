"""Token for token what transformers generates, in float32."""

from __future__ import annotations

from random import Random

import pytest
import torch

from asr_server.checkpoint.files import AudioWindow
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import DecodingOptions, Samples
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, Reference, transcribe
from tests.support.checkpoints import (
    english_only_directory,
    large_directory,
    narrow_large_directory,
    short_window_directory,
    tiny_directory,
)
from tests.support.speech import say

MAX_TOKENS = 20
DURATIONS_S = (30, 1, 7, 22, 0.3, 12, 29, 3, 18, 5, 26, 2, 9, 15, 30, 4)


def clips(count: int) -> list[Samples]:
    return [make_clip(i, duration_s) for i, duration_s in enumerate(DURATIONS_S[:count])]


def options(language: str | None, max_tokens: int = MAX_TOKENS) -> DecodingOptions:
    return DecodingOptions(language=language, max_new_tokens=max_tokens)


@pytest.fixture(scope="module")
def tiny_reference() -> Reference:
    return Reference(tiny_directory())


@pytest.mark.trial
@pytest.mark.parametrize("language", ["de", None])
def test_whisper_tinys_layout_gives_transformers_tokens_batched_and_alone(
    tiny: Checkpoint, tiny_reference: Reference, language: str | None
) -> None:
    asked = options(language)
    some = clips(16)
    expected = tiny_reference.transcribe(some, language, MAX_TOKENS)
    assert len(set(expected)) >= 6, "the audio must matter"
    together = transcribe(tiny.engine(), some, asked)
    assert [result.tokens for result in together] == expected
    alone = [transcribe(tiny.engine(num_slots=1), [clip], asked)[0] for clip in some[:2]]
    assert [result.tokens for result in alone] == expected[:2]


def test_large_v3s_vocabulary_languages_and_features_give_transformers_tokens() -> None:
    some, asked = clips(2), options("yue")
    expected = Reference(narrow_large_directory()).transcribe(some, "yue", MAX_TOKENS)
    assert len(set(expected)) == 2, "the audio must matter"
    checkpoint = Checkpoint.load(narrow_large_directory())
    assert [result.tokens for result in transcribe(checkpoint.engine(), some, asked)] == expected


@pytest.mark.trial
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("language", ["yue", None])
def test_large_v3s_layout_gives_transformers_tokens_for_sixteen_clips(language: str | None) -> None:
    some, asked = clips(16), options(language)
    expected = Reference(large_directory()).transcribe(some, language, MAX_TOKENS)
    checkpoint = Checkpoint.load(large_directory())
    assert [result.tokens for result in transcribe(checkpoint.engine(), some, asked)] == expected
    alone = [transcribe(checkpoint.engine(num_slots=1), [clip], asked)[0] for clip in some]
    assert [result.tokens for result in alone] == expected


@pytest.mark.parametrize("last_timestamp_s", [8, pytest.param(30, marks=pytest.mark.trial)])
def test_a_window_of_eight_seconds_gives_transformers_tokens(last_timestamp_s: int) -> None:
    directory = short_window_directory(last_timestamp_s)
    some = [make_clip(i, duration_s) for i, duration_s in enumerate((8, 1, 7.99, 0.3, 4))]
    reference, checkpoint = Reference(directory), Checkpoint.load(directory)
    assert reference.features(some).shape == (5, 80, 800)
    expected = reference.transcribe(some, "de", MAX_TOKENS)
    assert len(set(expected)) >= 4, "the audio must matter"
    found = transcribe(checkpoint.engine(), some, options("de"))
    assert [result.tokens for result in found] == expected


def test_an_english_only_checkpoint_gives_transformers_tokens() -> None:
    expected = Reference(english_only_directory()).transcribe(clips(4), None, MAX_TOKENS)
    checkpoint = Checkpoint.load(english_only_directory())
    found = transcribe(checkpoint.engine(), clips(4), options(None))
    assert [result.tokens for result in found] == expected
    assert {result.language for result in found} == {None}


def test_the_embedded_model_gives_transformers_tokens(embedded: Checkpoint) -> None:
    spoken = [say(digits, voice) for digits in ("1", "427", "90817263", "55") for voice in ("f3", "rms")]
    window = AudioWindow.from_directory(EMBEDDED_MODEL).num_samples
    some = [each.samples for each in spoken] + [clip[:window] for clip in clips(8)]
    expected = Reference(EMBEDDED_MODEL).transcribe(some, "en", 100)
    asked = options("en", max_tokens=100)
    found = transcribe(embedded.engine(), some, asked)
    assert [result.tokens for result in found] == expected
    alone = [transcribe(embedded.engine(num_slots=1), [clip], asked) for clip in some[:8]]
    assert [result.tokens for (result,) in alone] == expected[:8]


def test_bfloat16_changes_no_transcript_of_the_embedded_model(embedded: Checkpoint) -> None:
    half = Checkpoint.load(EMBEDDED_MODEL, torch.bfloat16)
    random = Random(5)
    digits = ["".join(random.choices("0123456789", k=count)) for count in range(1, 9)]
    some = [say(each, voice).samples for each, voice in zip(digits, ("f3", "rms") * 4, strict=True)]
    texts = [
        [each.tokenizer.decode(result.tokens) for result in transcribe(each.engine(), some, options("en"))]
        for each in (embedded, half)
    ]
    assert any(texts[0]), "the model must hear something"
    assert texts[0] == texts[1]
