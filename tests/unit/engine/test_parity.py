"""Token for token what transformers generates; prompts and figures as openai-whisper's decoder has them."""

import importlib
import math
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from asr_server.checkpoint.sizes import read_window
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import TEMPERATURE_LADDER, DecodingOptions, Samples
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, Reference, transcribe
from harness.openai_whisper import load_openai_whisper
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
    window = read_window(EMBEDDED_MODEL).num_samples
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


SHORT_TEXT = 16
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
        sample_len=SHORT_TEXT,
        prompt=list(prompt) or None,
        fp16=False,
    )
    with torch.inference_mode():
        expected = whisper.decode(
            theirs, torch.stack([whisper.pad_or_trim(mel, whisper.audio.N_FRAMES) for mel in mels]), asked
        )
    options = DecodingOptions(task=task, language="de", prompt_tokens=prompt, max_new_tokens=SHORT_TEXT)
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
