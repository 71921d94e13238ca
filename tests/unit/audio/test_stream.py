"""Streams of 16 kHz by decoders that hand out given blocks: limits, two files, a second decoder."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from asr_server.audio.decoder import AudioLimits, Block, DecodeTask, invalid_audio
from asr_server.audio.ffmpeg_process import PairedStream
from asr_server.audio.stream import DecodedStream, FallbackStream, Stream
from asr_server.core import SAMPLE_RATE, Samples, Track
from asr_server.errors import AudioTooLong, NotStereo


class Blocks:
    """A decoder of 16 kHz that has these blocks, [frames] of one channel or [frames, channels]."""

    sample_rate = SAMPLE_RATE
    layout: tuple[str, ...] = ()
    is_float = False

    def __init__(
        self, *blocks: Samples, duration_s: float | None = None, error: Exception | None = None
    ) -> None:
        self._blocks = [block.reshape(len(block), -1) for block in blocks]
        self.num_channels = self._blocks[0].shape[1]
        self.duration_s, self.has_exact_duration = duration_s, duration_s is not None
        self.tracks_read: tuple[Track, ...] = ()
        self.truncated = self.has_more = self.is_closed = False
        self._error = error

    def read(self) -> Block:
        if self._blocks:
            return self._blocks.pop(0)
        if self._error:
            raise self._error
        return np.empty((0, self.num_channels), np.float32)

    def close(self) -> None:
        self.is_closed = True


def ramp(first: int, end: int) -> Samples:
    return np.arange(first, end, dtype=np.float32)


def streamed(*blocks: Samples, limits: AudioLimits | None = None, split: bool = False) -> DecodedStream:
    return DecodedStream(Blocks(*blocks), DecodeTask(limits or AudioLimits(), split))


def whole(stream: Stream) -> Samples:
    blocks = []
    while (block := stream.read()) is not None:
        blocks.append(block.copy())
    return np.concatenate(blocks)


def test_a_header_beyond_the_limit_is_refused_before_a_sample_is_read() -> None:
    with pytest.raises(AudioTooLong, match="max-audio-s"):
        DecodedStream(Blocks(ramp(0, 5), duration_s=11.0), DecodeTask(AudioLimits(max_audio_s=10.0)))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (AudioLimits(max_audio_s=1.0), "max-audio-s"),
        (AudioLimits(max_decoded_bytes=64_000), "decoded size"),
    ],
)
def test_samples_beyond_a_limit_are_refused_when_they_come(limits: AudioLimits, words: str) -> None:
    stream = streamed(ramp(0, SAMPLE_RATE), ramp(0, 1), limits=limits)
    assert stream.read() is not None
    with pytest.raises(AudioTooLong, match=words):
        stream.read()


@pytest.mark.parametrize(("num_channels", "words"), [(1, "1 channel"), (3, "3 channels")])
def test_only_two_channels_can_be_split(num_channels: int, words: str) -> None:
    with pytest.raises(NotStereo, match=rf"this one has {words}\."):
        streamed(np.zeros((4, num_channels), np.float32), split=True)
    both = np.stack([ramp(0, 4), ramp(4, 8)], axis=1)
    assert np.array_equal(whole(streamed(both, split=True)), both)


def test_two_files_are_read_side_by_side_and_the_shorter_ends_in_silence() -> None:
    longer, shorter = streamed(ramp(0, 3), ramp(3, 9)), streamed(ramp(10, 15))
    both = whole(PairedStream(longer, shorter))
    assert np.array_equal(both[:, 0], ramp(0, 9))
    assert np.array_equal(both[:, 1], [*ramp(10, 15), 0, 0, 0, 0])


def stopped_at(num_samples: int) -> Blocks:
    decoder = Blocks(ramp(0, num_samples))
    decoder.has_more = True
    return decoder


@pytest.mark.parametrize("cuts", [[12], [2, 12], [6, 12]])
def test_where_the_first_decoder_stops_the_second_goes_on_without_repeating(cuts: list[int]) -> None:
    parts = [ramp(first, end) for first, end in zip([0, *cuts], cuts, strict=False)]
    stream = FallbackStream(DecodedStream(stopped_at(6), DecodeTask()), lambda: streamed(*parts))
    assert np.array_equal(whole(stream), ramp(0, 12))
    stream.close()


def broken() -> DecodedStream:
    return DecodedStream(Blocks(ramp(0, 8), error=invalid_audio("Damaged.")), DecodeTask())


@pytest.mark.parametrize(("open_fallback", "end"), [(broken, 8), (lambda: streamed(ramp(0, 4)), 6)])
def test_a_second_decoder_that_stops_too_loses_nothing_that_was_read(
    open_fallback: Callable[[], Stream], end: int
) -> None:
    stream = FallbackStream(DecodedStream(stopped_at(6), DecodeTask()), open_fallback)
    assert np.array_equal(whole(stream), ramp(0, end))
