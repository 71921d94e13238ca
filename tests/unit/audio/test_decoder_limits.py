"""Each limit is taken to the last unit, and the error names it."""

from __future__ import annotations

import pytest

from asr_server.audio.decoder import AudioLimits
from asr_server.errors import (
    AudioTooLong,
    InvalidAudio,
    RequestError,
    SampleRateTooHigh,
    TooManyChannels,
)

LIMITS = AudioLimits(
    max_audio_s=10.0, max_decoded_bytes=100, max_sample_rate=48_000, max_channels=2, max_preprocess_s=3.0
)


@pytest.mark.parametrize(
    ("sample_rate", "num_channels", "kind", "words"),
    [
        (999, 1, InvalidAudio, "claims 1 channels at 999 Hz"),
        (16_000, 0, InvalidAudio, "claims 0 channels"),
        (48_001, 1, SampleRateTooHigh, "over the limit of 48000 Hz"),
        (16_000, 3, TooManyChannels, "channels, 3, is over the limit of 2"),
    ],
)
def test_a_layout_beyond_the_limits_is_refused(
    sample_rate: int, num_channels: int, kind: type[RequestError], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        LIMITS.check_layout(sample_rate, num_channels)
    assert type(refused.value) is kind


def test_what_is_just_within_all_limits_is_taken() -> None:
    LIMITS.check_layout(1000, 1)
    LIMITS.check_layout(48_000, 2)
    LIMITS.check_decoded(100, 10.0)
    LIMITS.check_work(3.0)
    with pytest.raises(AudioTooLong, match="decoding time is over the limit of 3 s"):
        LIMITS.check_work(3.1)
