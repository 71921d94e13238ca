"""Token times with the published weights: those of openai/whisper, in nine languages."""

from functools import partial

import numpy as np
import pytest

from asr_server.core import DecodingOptions
from asr_server.engine import alignment
from asr_server.engine.alignment import first_frames
from harness.engine_helpers import results, run, submit
from harness.openai_whisper import token_times_s
from harness.speech import Clip, corpus
from tests.support.real_weights import loaded_base, openai_whisper_base

NEAR_S = 0.0201  # one position, and rounding


def spoken() -> list[Clip]:
    """A sentence in each of nine languages."""
    endings = ("pangrama", "quick_brown_fox")
    by_language = {clip.language: clip for clip in corpus("audioeval") if clip.name.endswith(endings)}
    if len(by_language) < 8:
        pytest.skip("the recordings of pytest-audioeval are not here")
    return [by_language[language] for language in sorted(by_language)]


@pytest.mark.trial
@pytest.mark.parametrize("share_frames", [True, False])
def test_token_times_of_real_speech_are_those_of_openai_whisper(
    share_frames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position of its own for each token moves it by one position, seldom by more."""
    monkeypatch.setattr(alignment, "first_frames", partial(first_frames, share_frames=share_frames))
    clips = {clip.language: clip.samples() for clip in spoken()}
    checkpoint, reference = loaded_base(), openai_whisper_base().float()
    engine = checkpoint.engine()
    for language, samples in clips.items():
        options = DecodingOptions(language=language, word_timestamps=True)
        submit(engine, language, samples, options)
    found = results(run(engine))
    offs_s: list[float] = []
    for language, samples in clips.items():
        result = found[language]
        expected = token_times_s(reference, checkpoint.tokenizer, samples, result.tokens, language)
        offs_s += np.abs(np.array(expected) - np.array(result.token_times_s)).tolist()
    assert len(offs_s) > 20, "or one off is more than a twentieth"
    assert np.mean(np.array(offs_s) <= NEAR_S) >= 0.95
