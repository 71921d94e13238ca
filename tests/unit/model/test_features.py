"""Log-mel spectrograms, against transformers' feature extractor and, padded with zeros, openai-whisper's."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from asr_server.core import Samples
from asr_server.model.features import LogMel
from harness.clips import make_clip
from harness.openai_whisper import transcribed_features

CLIPS: dict[str, Samples] = {
    "thirty seconds": make_clip(1, 30),
    "a few seconds": make_clip(2, 3.217),
    "one sample": np.ones(1, np.float32),
    "a tenth of a second": make_clip(3, 0.1),
    "silence": np.zeros(16_000, np.float32),
    "very quiet": make_clip(4, 12) * np.float32(1e-4),
    "to the last frame but one": make_clip(5, 29.99),
}


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("name", [*CLIPS, "as long as half a frame more"])
def test_zero_padded_features_are_those_that_openai_whisper_transcribes(name: str, num_mels: int) -> None:
    """Zeros behind the chunk's own frames, the last of which hear silence behind them."""
    clip = CLIPS.get(name, make_clip(7, 3.005))
    expected = transcribed_features(clip, num_mels, 3000)
    found = LogMel(num_mels, 3000, pads_with_zeros=True)([clip])[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("name", CLIPS)
def test_features_are_those_of_transformers(name: str, num_mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    extractor: Any = WhisperFeatureExtractor(feature_size=num_mels)  # type: ignore[no-untyped-call]
    expected = extractor([CLIPS[name]], sampling_rate=16_000, return_tensors="pt").input_features
    torch.testing.assert_close(LogMel(num_mels, 3000)([CLIPS[name]]), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pads_with_zeros", [False, True])
def test_features_do_not_depend_on_who_else_is_in_the_batch(pads_with_zeros: bool) -> None:
    log_mel, clips = LogMel(80, 3000, pads_with_zeros), list(CLIPS.values())
    together = log_mel(clips)
    for row, clip in zip(together, clips, strict=True):
        torch.testing.assert_close(row, log_mel([clip])[0], atol=2e-6, rtol=0)


def test_what_lies_beyond_the_window_is_cut_off() -> None:
    long = make_clip(6, 31)
    log_mel = LogMel(80, 3000)
    assert torch.equal(log_mel([long]), log_mel([long[: 30 * 16_000]]))


def test_samples_may_be_read_only_as_those_in_shared_memory_are() -> None:
    clip = CLIPS["a few seconds"].copy()
    expected = LogMel(80, 3000)([clip])
    clip.flags.writeable = False
    assert torch.equal(LogMel(80, 3000)([clip]), expected)


def test_threads_that_gather_samples_together_gather_the_same() -> None:
    log_mel, chunks = LogMel(80, 3000), list(CLIPS.values())
    with ThreadPoolExecutor(3) as executor:
        assert torch.equal(log_mel.gather(chunks, 480_000, executor.map), log_mel.gather(chunks, 480_000))
