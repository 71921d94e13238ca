"""Find the channel in which a voice is clear, and the channel that a voice only leaks into.

A mix hides a voice that stands in one channel beside noise in another: those seconds are read from the clear
channel. Where each channel is a speaker, what is softer there than in the other one, and follows its
loudness, is muted.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server.audio.recording import ChunkSource, PreprocessPool, Recording
from asr_server.core import SAMPLE_RATE, Chunk, Samples
from asr_server.levels import Interval, runs
from asr_server.transcription.heard import SURELY_S, Heard, hear

MAX_CHANNELS: Final = 8  # searched for a voice; a microphone array has more, and all of them hear the same
MIN_HIDDEN_S: Final = 1.0  # of sound without a voice in the mix, which a channel may have
LOUD: Final = 0.1  # of the loudness of the whole chunk: softer sound hides no voice

HOP: Final = SAMPLE_RATE // 50  # 20 ms
SMOOTH_HOPS: Final = 5  # a voice comes up to 0.1 s later to the far microphone
WINDOW_HOPS: Final = 100  # 2 s, in which the loudness of one channel follows that of the other
LEAK: Final = 0.4  # of the other channel's power (4 dB), at most
LIKE_LEAK: Final = 0.8  # correlation of both powers in a window
LIKE_COPY: Final = 0.98
COPY: Final = 4.0  # times the power of the other channel, at most
ECHO_HOPS: Final = 15  # 0.3 s, for which a room goes on
MIN_OWN_HOPS: Final = 15  # 0.3 s: a shorter sound between two leaks is theirs
LEAST_POWER: Final = 1e-15

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class ClearChannels:
    """Decode the channels of a recording beside their mix, from the first chunk that may hide a voice."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._channels: list[_Channel] = []

    async def hear(self, chunk: Chunk, pool: PreprocessPool) -> Heard:
        heard = await pool.run(hear, chunk)
        hidden_s = _hidden_s(chunk, heard)
        if not hidden_s:
            return heard
        if not self._channels:
            count = min(self._recording.num_channels, MAX_CHANNELS)
            self._channels = [_Channel(self._recording.of_channel(number)) for number in range(count)]
        first, end = chunk.start_sample, chunk.start_sample + len(chunk.samples)
        parts = [await channel.between(first, end, pool) for channel in self._channels]
        return await pool.run(_with_clearest, heard, hidden_s, parts)

    def close(self) -> None:
        for channel in self._channels:
            channel.recording.close()


class _Channel:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        recording.listener = self._push
        self._blocks: list[Samples] = []
        self._start = self._end = 0  # of the samples held, in the file
        self._is_finished = False

    def _push(self, samples: Samples) -> None:
        self._blocks.append(samples.copy())
        self._end += len(samples)

    async def between(self, first: int, end: int, pool: PreprocessPool) -> Samples:
        while self._end < end and not self._is_finished:
            self._is_finished = (await pool.decode_slice(self.recording)).finished
            while self._blocks and self._start + len(self._blocks[0]) <= first:
                self._start += len(self._blocks.pop(0))
        held = np.concatenate(self._blocks) if self._blocks else np.empty(0, np.float32)
        return held[first - self._start : end - self._start]


def _hidden_s(chunk: Chunk, heard: Heard) -> list[Interval]:
    end_s = chunk.start_s + chunk.duration_s
    starts_s = [chunk.start_s, *(last_s for _, last_s in heard.possible_s)]
    ends_s = [*(first_s for first_s, _ in heard.possible_s), end_s]
    least = LOUD * np.std(chunk.samples)
    return [
        (start_s, stop_s)
        for start_s, stop_s in zip(starts_s, ends_s, strict=True)
        if stop_s - start_s >= MIN_HIDDEN_S
        and np.std(chunk.samples[_samples(start_s, stop_s, chunk)]) > least
    ]


def _samples(start_s: float, end_s: float, chunk: Chunk) -> slice:
    first, end = round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
    return slice(first - chunk.start_sample, end - chunk.start_sample)


def _with_clearest(heard: Heard, hidden_s: Sequence[Interval], channels: Sequence[Samples]) -> Heard:
    chunk = heard.chunk
    alone = [msgspec.structs.replace(chunk, samples=samples) for samples in channels]
    heard_alone = [hear(each) for each in alone if len(each.samples) == len(chunk.samples)]
    samples = chunk.samples.copy()
    is_changed = False
    for start_s, end_s in hidden_s:
        spoken_s = [each.certainly_spoken_s(start_s, end_s) for each in heard_alone]
        if max(spoken_s, default=0.0) >= SURELY_S:
            within = _samples(start_s, end_s, chunk)
            samples[within] = heard_alone[int(np.argmax(spoken_s))].chunk.samples[within]
            is_changed = True
    return hear(msgspec.structs.replace(chunk, samples=samples)) if is_changed else heard


class SplitChannels:
    """Follow the loudness of two channels, each a speaker's, and mute in each what the other one says."""

    def __init__(self, recording: Recording | ChunkSource) -> None:
        assert isinstance(recording, Recording), "a chunk of live audio has one channel"
        recording.listener = self.push
        self._powers: list[Floats] = []  # a thread appends while others read
        self._rest = np.empty((0, 2), np.float32)

    def push(self, samples: Samples) -> None:
        """Take [num_samples, 2]."""
        held = np.concatenate([self._rest, samples])
        num_hops = len(held) // HOP
        hops = held[: num_hops * HOP].reshape(num_hops, HOP, 2)
        self._powers.append(np.einsum("hsc,hsc->hc", hops, hops, dtype=np.float64) / HOP)
        self._rest = held[num_hops * HOP :].copy()

    def close(self) -> None:
        self._powers = []

    async def hear(self, chunk: Chunk, pool: PreprocessPool) -> Heard:
        muted, is_copy = await pool.run(self._mute, chunk)
        heard = await pool.run(hear, muted)
        stretches = heard.stretches if heard.possible_s or muted is chunk else []
        return msgspec.structs.replace(heard, stretches=stretches, is_copy=is_copy)

    def _mute(self, chunk: Chunk) -> tuple[Chunk, bool]:
        first = chunk.start_sample // HOP
        powers = np.concatenate(self._powers)[first : first + -(-len(chunk.samples) // HOP)]
        own, other = powers[:, chunk.channel], powers[:, 1 - chunk.channel]
        is_leak, is_copy = leaks(own, other)
        if chunk.channel == 0:
            is_copy[:] = False  # the first channel is the one that is read
        is_muted = is_leak | is_copy
        if not is_muted.any():
            return chunk, False
        offset = chunk.start_sample - first * HOP
        gains = np.repeat(~is_muted, HOP)[offset : offset + len(chunk.samples)].astype(np.float32)
        gains = np.pad(gains, (0, len(chunk.samples) - len(gains)), mode="edge")
        sounds = own > _floor(own)
        muted = msgspec.structs.replace(chunk, samples=chunk.samples * gains)
        return muted, bool(is_copy[sounds].mean() > 0.5) if sounds.any() else False


def leaks(own: Floats, other: Floats) -> tuple[Flags, Flags]:
    """Return for each hop whether the sound is the other channel's, and whether both are the same.

    Args:
        own, other: [num_hops] powers.
    """
    own, other = _smooth(own - _floor(own)), _smooth(other - _floor(other))
    width = min(WINDOW_HOPS, len(own))
    means = [_window_means(values, width) for values in (own, other, own * other, own**2, other**2)]
    covariance = means[2] - means[0] * means[1]
    variances = (means[3] - means[0] ** 2) * (means[4] - means[1] ** 2)
    correlation = covariance / np.sqrt(np.maximum(variances, LEAST_POWER**2))
    is_softer = means[0] <= LEAK * means[1]
    is_leak = _any_window((correlation >= LIKE_LEAK) & is_softer, width)
    is_copy = _any_window((correlation >= LIKE_COPY) & ~is_softer & (means[0] <= COPY * means[1]), width)
    echo = np.max([np.pad(other, (late, 0))[: len(other)] for late in range(ECHO_HOPS)], axis=0)
    is_leak &= own <= LEAK * echo
    for first, end in runs(~is_leak).tolist():
        if first > 0 and end < len(own) and end - first < MIN_OWN_HOPS:
            is_leak[first:end] = True
    return is_leak, is_copy


def _window_means(values: Floats, width: int) -> Floats:
    sums = np.cumsum(np.pad(values, (1, 0)))
    return (sums[width:] - sums[:-width]) / width if width else np.empty(0)


def _any_window(flags: Flags, width: int) -> Flags:
    changes = np.pad(flags.astype(int), (0, width)) - np.pad(flags.astype(int), (width, 0))
    return np.cumsum(changes)[: len(flags) + width - 1] > 0


def _floor(powers: Floats) -> float:
    return float(np.quantile(powers, 0.1)) if len(powers) else 0.0


def _smooth(powers: Floats) -> Floats:
    width = min(SMOOTH_HOPS, len(powers))
    return np.convolve(np.maximum(powers, 0.0), np.full(width, 1 / width), mode="same") if width else powers
