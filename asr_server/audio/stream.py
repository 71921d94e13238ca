"""Read a file as 16 kHz blocks, mixed or with two channels apart, and check limits. Knows no requests."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from asr_server.audio.decoder import Decoder
from asr_server.audio.limits import AudioLimits
from asr_server.audio.mono import FloatScale, Mono16k, Stereo16k
from asr_server.core import SAMPLE_RATE, Samples, Track
from asr_server.errors import InvalidAudio, NotStereo


class Described(Protocol):
    @property
    def truncated(self) -> bool: ...

    @property
    def duration_s(self) -> float | None: ...

    @property
    def num_channels(self) -> int: ...

    @property
    def tracks_read(self) -> tuple[Track, ...]: ...

    def close(self) -> None: ...


class Stream(Described, Protocol):
    def read(self) -> Samples | None:
        """Return the next block, [samples] or [samples, 2], perhaps empty; None is the end. Memory is
        reused.
        """
        ...


class AroundSource:
    """A stream with the properties of its source."""

    def __init__(self, source: Described) -> None:
        self._source = source

    @property
    def truncated(self) -> bool:
        return self._source.truncated

    @property
    def duration_s(self) -> float | None:
        return self._source.duration_s

    @property
    def num_channels(self) -> int:
        return self._source.num_channels

    @property
    def tracks_read(self) -> tuple[Track, ...]:
        return self._source.tracks_read

    def close(self) -> None:
        self._source.close()


class DecodedStream(AroundSource):
    def __init__(
        self, decoder: Decoder, limits: AudioLimits, split_channels: bool = False, channel: int | None = None
    ) -> None:
        limits.check_layout(decoder.sample_rate, decoder.num_channels)
        if decoder.has_exact_duration:
            limits.check_decoded(0, decoder.duration_s or 0.0)
        super().__init__(decoder)
        self._decoder, self._limits = decoder, limits
        self._scale = FloatScale() if decoder.is_float else None
        self._to_16k = _stereo(decoder) if split_channels else _mono(decoder, channel)
        self._num_bytes = self._num_samples = 0
        self._blocks: Iterator[Samples] = itertools.chain(self.body(), self.tail())

    @property
    def has_more(self) -> bool:
        return self._decoder.has_more

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def body(self) -> Iterator[Samples]:
        while len(block := self._decoder.read()):
            self._num_bytes += block.nbytes
            scaled = block if self._scale is None else self._scale.push(block)
            yield self._counted(self._to_16k.push(scaled))

    def tail(self) -> Iterator[Samples]:
        yield self._counted(self._to_16k.finish())

    def close(self) -> None:
        self._blocks = iter(())  # the generator and this object hold each other, and the decoder's memory
        super().close()

    def _counted(self, samples: Samples) -> Samples:
        self._num_samples += len(samples)
        self._limits.check_decoded(self._num_bytes, self._num_samples / SAMPLE_RATE)
        return samples


def _mono(decoder: Decoder, channel: int | None) -> Mono16k:
    return Mono16k(decoder.sample_rate, decoder.num_channels, decoder.layout, channel)


def _stereo(decoder: Decoder) -> Stereo16k:
    if decoder.num_channels != 2:
        plural = "" if decoder.num_channels == 1 else "s"
        raise NotStereo(
            f"channels=split takes files of two channels, a speaker in each; this one has "
            f"{decoder.num_channels} channel{plural}."
        )
    return Stereo16k(decoder.sample_rate)


class PairedStream:
    def __init__(self, *streams: DecodedStream) -> None:
        self._streams = streams
        self._held: list[Samples] = [np.empty(0, np.float32) for _ in streams]

    @property
    def truncated(self) -> bool:
        return any(stream.truncated for stream in self._streams)

    @property
    def duration_s(self) -> float | None:
        durations = [stream.duration_s for stream in self._streams if stream.duration_s is not None]
        return max(durations, default=None)

    @property
    def num_channels(self) -> int:
        return len(self._streams)

    @property
    def tracks_read(self) -> tuple[Track, ...]:
        return tuple(track for stream in self._streams for track in stream.tracks_read)

    def read(self) -> Samples | None:
        waiting = [self._fill(number) for number in range(len(self._streams))]
        lengths = [len(held) for held in self._held]
        if not any(lengths) and not any(waiting):
            return None
        num_samples = min(
            (n for n, goes_on in zip(lengths, waiting, strict=True) if goes_on), default=max(lengths)
        )
        taken = [np.pad(held[:num_samples], (0, max(0, num_samples - len(held)))) for held in self._held]
        self._held = [held[num_samples:] for held in self._held]
        return np.ascontiguousarray(np.stack(taken, axis=1))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _fill(self, number: int) -> bool:
        if len(self._held[number]):
            return True
        samples = self._streams[number].read()
        if samples is not None:
            self._held[number] = samples.copy()
        return samples is not None


class FallbackStream(AroundSource):
    """A local decoder, and another stream that continues where it stops early.

    libsndfile stops at damage and at the first of joined MP3s. The other stream skips what was read.
    """

    def __init__(self, stream: DecodedStream, open_fallback: Callable[[], Stream]) -> None:
        super().__init__(stream)
        self._stream, self._open_fallback = stream, open_fallback
        self._fallback: Stream | None = None
        self._blocks = self._read()

    @property
    def truncated(self) -> bool:
        return self._stream.truncated or (self._fallback is not None and self._fallback.truncated)

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def close(self) -> None:
        self._blocks = iter(())
        super().close()
        if self._fallback:
            self._fallback.close()

    def _read(self) -> Iterator[Samples]:
        num_read = num_fallback = 0
        for samples in self._stream.body():
            num_read += len(samples)
            yield samples
        for samples in self._read_fallback():
            num_already = min(len(samples), max(0, num_read - num_fallback))
            num_fallback += len(samples)
            yield samples[num_already:]
        if num_fallback <= num_read:
            yield from self._stream.tail()

    def _read_fallback(self) -> Iterator[Samples]:
        if not self._stream.has_more:
            return
        self._fallback = self._open_fallback()
        with contextlib.suppress(InvalidAudio):
            while (samples := self._fallback.read()) is not None:
                yield samples
