"""Read a file as 16 kHz blocks: mixed or with two channels apart, whole or in clips. Checks limits."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from asr_server.audio.decoder import Decoder, DecodeTask, FileInfo
from asr_server.audio.mono import FloatScale, Mono16k, Stereo16k
from asr_server.core import SAMPLE_RATE, Clip, Samples
from asr_server.errors import InvalidAudio, NotStereo


class Stream(Protocol):
    @property
    def info(self) -> FileInfo: ...

    def read(self) -> Samples | None:
        """Return the next block, [samples] or [samples, 2], perhaps empty; None is the end. Memory is
        reused.
        """
        ...

    def close(self) -> None: ...


class DecodedStream:
    def __init__(self, decoder: Decoder, task: DecodeTask) -> None:
        limits = task.limits
        limits.check_layout(decoder.sample_rate, decoder.num_channels)
        if decoder.has_exact_duration:
            limits.check_decoded(0, decoder.duration_s or 0.0)
        self._decoder, self._limits = decoder, limits
        self._scale = FloatScale() if decoder.is_float else None
        self._to_16k = _stereo(decoder) if task.split_channels else _mono(decoder, task.channel)
        self._num_bytes = self._num_samples = 0
        self._blocks: Iterator[Samples] = itertools.chain(self.body(), self.tail())

    @property
    def info(self) -> FileInfo:
        decoder = self._decoder
        return FileInfo(decoder.duration_s, decoder.num_channels, decoder.tracks_read, decoder.truncated)

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
        self._decoder.close()

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
    def info(self) -> FileInfo:
        infos = [stream.info for stream in self._streams]
        durations = [info.duration_s for info in infos if info.duration_s is not None]
        tracks = tuple(track for info in infos for track in info.tracks_read)
        is_truncated = any(info.truncated for info in infos)
        return FileInfo(max(durations, default=None), len(infos), tracks, is_truncated)

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


class FallbackStream:
    """A local decoder, and another stream that continues where it stops early.

    libsndfile stops at damage and at the first of joined MP3s. The other stream skips what was read.
    """

    def __init__(self, stream: DecodedStream, open_fallback: Callable[[], Stream]) -> None:
        self._stream, self._open_fallback = stream, open_fallback
        self._fallback: Stream | None = None
        self._blocks = self._read()

    @property
    def info(self) -> FileInfo:
        info = self._stream.info
        is_truncated = info.truncated or (self._fallback is not None and self._fallback.info.truncated)
        return msgspec.structs.replace(info, truncated=is_truncated)

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def close(self) -> None:
        self._blocks = iter(())
        self._stream.close()
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


class ClippedStream:
    """The parts of a recording within clips, which are in order; silence lies between, so that times stay."""

    def __init__(self, stream: Stream, clips: Sequence[Clip]) -> None:
        self._stream = stream
        self._first_s, self._end_s = clips[0].start_s, clips[-1].end_s
        self._spans = [(_sample_at(clip.start_s), _sample_at(clip.end_s)) for clip in clips]
        self._num_read = 0
        self._has_ended = False

    @property
    def info(self) -> FileInfo:
        info = self._stream.info
        duration_s = info.duration_s if info.duration_s is None else min(info.duration_s, self._end_s)
        is_truncated = self._has_ended and info.truncated
        return msgspec.structs.replace(info, duration_s=duration_s, truncated=is_truncated)

    def close(self) -> None:
        self._stream.close()

    def read(self) -> Samples | None:
        start = self._num_read
        if start >= self._spans[-1][1]:
            return None
        samples = self._stream.read()
        if samples is None:
            self._has_ended = True
            self._require_some()
            return None
        self._num_read += len(samples)
        kept = np.zeros_like(samples)
        for first, end in self._spans:
            inside = slice(max(0, first - start), max(0, end - start))
            kept[inside] = samples[inside]
        return kept[: self._spans[-1][1] - start]

    def _require_some(self) -> None:
        if self._num_read <= self._spans[0][0]:
            length_s = self._num_read / SAMPLE_RATE
            raise InvalidAudio(
                f"The first clip begins at {self._first_s:g} s, and the recording is {length_s:.1f} s long."
            )


def _sample_at(time_s: float) -> int:
    return np.iinfo(np.int64).max if math.isinf(time_s) else round(time_s * SAMPLE_RATE)
